// Runs a kernel on the host, one block after the other. The threads of a block are fibers of one
// thread, each of which runs until its next barrier or exchange. Every memory access is checked.
//
// Errors: an access outside of the arguments of the kernel; an access that is not aligned to its
// size; a barrier or an exchange that some threads do not reach, or reach at another place; and a
// race: two threads access the same address, at least one of them writes, and there is no barrier in
// between (there is none between different blocks).
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#include <map>
#include <string>
#include <vector>

#include "cuda.hpp"

// The kernels' shared memory is between these two symbols of this library.
extern char __bss_start __attribute__((visibility("hidden")));
extern char _end __attribute__((visibility("hidden")));

// Data of this file is outside of this memory, which is overwritten before every block.
#define KEPT __attribute__((section(".data")))

KEPT Here here = {};

namespace {

constexpr size_t STACK = 1 << 16;
constexpr int MANY = -2, NONE = -1;

struct Access {
    int block = NONE, thread = NONE, epoch = NONE;
};

struct Cell {
    Access write, read;
};

struct Array {
    const char* name;
    uintptr_t start, stop;
    size_t element;  // bytes whose accesses are recorded together
    std::vector<Cell> cells;
};

enum class State { ready, barrier, exchange, done };

struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(STACK);
    State state;
    int line;
    unsigned mask;
    int partner;
    unsigned long long bits, received;
};

struct Machine {
    std::map<std::string, Run> kernels;
    std::vector<Fiber> fibers;
    std::vector<Array> arrays;  // the last is the shared memory
    ucontext_t scheduler;
    Run run;
    void** arguments;
    int running, threads, block, epoch;
    std::string error;
};

Machine& machine()
{
    static KEPT Machine* only = nullptr;
    if (!only)
        only = new Machine;
    return *only;
}

std::string at(const char* what)
{
    char place[200];
    snprintf(place, sizeof place, "thread (%u, %u) of block (%u, %u) %s", here.thread.x,
             here.thread.y, here.place.x, here.place.y, what);
    return place;
}

// End the running fiber.
void fail(const std::string& error)
{
    machine().error = error;
    setcontext(&machine().scheduler);
}

bool on_stack(uintptr_t address)
{
    Machine& m = machine();
    const uintptr_t bottom = reinterpret_cast<uintptr_t>(m.fibers[m.running].stack.data());
    return address - bottom < STACK;
}

void remember(Cell& cell, bool write, const char* name)
{
    Machine& m = machine();
    const Access mine = {m.block, m.running, m.epoch};
    const auto apart = [&](const Access& other) {
        if (other.block == NONE || (other.block == mine.block && other.thread == mine.thread))
            return true;
        return other.block == mine.block && other.epoch != mine.epoch;
    };
    if (!apart(cell.write) || (write && !apart(cell.read)))
        fail(at("races with another one for a place in ") + name);
    if (write) {
        cell.write = mine;
    } else if (cell.read.block != NONE && cell.read.block != mine.block) {
        cell.read = {MANY, MANY, mine.epoch};
    } else if (cell.read.epoch == mine.epoch && cell.read.thread != mine.thread) {
        cell.read.thread = MANY;
    } else {
        cell.read = mine;
    }
}

void touch(void* pointer, unsigned size, bool write, bool any_alignment = false)
{
    Machine& m = machine();
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    if (m.running == NONE || on_stack(address))
        return;
    if (address - reinterpret_cast<uintptr_t>(&here) < sizeof here)
        return;
    const std::string did = (write ? "writes " : "reads ") + std::to_string(size) + " bytes ";
    if (address % size && !any_alignment)
        fail(at((did + "that are not aligned").c_str()));
    for (Array& array : m.arrays) {
        if (address < array.start || address + size > array.stop)
            continue;
        const size_t first = (address - array.start) / array.element;
        for (size_t i = first; i <= (address + size - 1 - array.start) / array.element; i++)
            remember(array.cells[i], write, array.name);
        return;
    }
    std::string where = "outside of all arrays";
    for (const Array& array : m.arrays)
        if (address + 4096 > array.start && address < array.stop + 4096)
            where += std::string(", near ") + array.name;
    fail(at((did + where).c_str()));
}

// Yield until `state` has ended.
void wait(State state, int line)
{
    Machine& m = machine();
    Fiber& fiber = m.fibers[m.running];
    fiber.state = state;
    fiber.line = line;
    swapcontext(&fiber.context, &m.scheduler);
}

void start()
{
    Machine& m = machine();
    m.run(m.arguments);
    m.fibers[m.running].state = State::done;
    setcontext(&m.scheduler);
}

void prepare(int number)
{
    Fiber& fiber = machine().fibers[number];
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = STACK;
    makecontext(&fiber.context, start, 0);
    fiber.state = State::ready;
}

void resume(int number)
{
    Machine& m = machine();
    m.running = number;
    here.thread = {number % here.block.x, number / here.block.x, 0};
    swapcontext(&m.scheduler, &m.fibers[number].context);
    m.running = NONE;
}

// Return true if the `count` fibers from `first` on all wait at the same place for `state`.
bool together(State state, int first, int count)
{
    const std::vector<Fiber>& fibers = machine().fibers;
    for (int i = first; i < first + count; i++)
        if (fibers[i].state != state || fibers[i].line != fibers[first].line)
            return false;
    return true;
}

void release(int first, int count)
{
    Machine& m = machine();
    for (int i = first; i < first + count; i++) {
        if (m.fibers[i].state == State::exchange)
            m.fibers[i].received = m.fibers[first + m.fibers[i].partner].bits;
        m.fibers[i].state = State::ready;
    }
}

// Resume the fibers whose wait is over; return true if there were any.
bool advance()
{
    Machine& m = machine();
    if (together(State::barrier, 0, m.threads)) {
        m.epoch++;
        release(0, m.threads);
        return true;
    }
    bool any = false;
    for (int first = 0; first < m.threads; first += 32)
        if (first + 32 <= m.threads && together(State::exchange, first, 32)) {
            release(first, 32);
            any = true;
        }
    return any;
}

void run_block()
{
    Machine& m = machine();
    Array& shared = m.arrays.back();
    memset(reinterpret_cast<void*>(shared.start), 0xff, shared.stop - shared.start);  // NaN
    shared.cells.assign(shared.cells.size(), Cell());
    for (int i = 0; i < m.threads; i++)
        prepare(i);
    m.epoch++;
    do {
        for (int i = 0; i < m.threads && m.error.empty(); i++)
            if (m.fibers[i].state == State::ready)
                resume(i);
    } while (m.error.empty() && advance());
    int done = 0;
    for (int i = 0; i < m.threads; i++)
        done += m.fibers[i].state == State::done;
    if (m.error.empty() && done < m.threads)
        m.error = "a barrier or an exchange is not reached by all threads at the same place";
}

}  // namespace

void add_kernel(const char* name, Run run) { machine().kernels[name] = run; }

void barrier(int line) { wait(State::barrier, line); }

unsigned long long exchange(unsigned mask, unsigned long long bits, int distance, int line)
{
    Machine& m = machine();
    Fiber& fiber = m.fibers[m.running];
    if (mask != 0xffffffff)
        fail(at("exchanges with a part of its warp, which is not emulated"));
    fiber.bits = bits;
    fiber.partner = m.running % 32 ^ distance;
    wait(State::exchange, line);
    return fiber.received;
}

// Run the kernel on `count` named arrays with their sizes in bytes and element sizes. Return the
// error, or null.
extern "C" const char* emulate(const char* name, const unsigned* grid, const unsigned* block,
                               void** arguments, int count, const char** names, char** starts,
                               const size_t* sizes, const size_t* elements)
{
    Machine& m = machine();
    m.error.clear();
    m.arrays.clear();
    const auto add = [&](const char* called, char* start, size_t size, size_t element) {
        const uintptr_t from = reinterpret_cast<uintptr_t>(start);
        const size_t count = size / element + 1;
        m.arrays.push_back({called, from, from + size, element, std::vector<Cell>(count)});
    };
    for (int i = 0; i < count; i++)
        add(names[i], starts[i], sizes[i], elements[i]);
    add("the shared memory", &__bss_start, &_end - &__bss_start, 2);
    if (!m.kernels.count(name))
        return "no such kernel";
    m.run = m.kernels[name], m.arguments = arguments;
    m.threads = block[0] * block[1], m.running = NONE;
    if (m.fibers.size() < static_cast<size_t>(m.threads))
        m.fibers.resize(m.threads);
    here.grid = {grid[0], grid[1], 1}, here.block = {block[0], block[1], 1};
    for (unsigned y = 0; y < grid[1] && m.error.empty(); y++)
        for (unsigned x = 0; x < grid[0] && m.error.empty(); x++) {
            here.place = {x, y, 0};
            m.block = y * grid[0] + x;
            run_block();
        }
    return m.error.empty() ? nullptr : m.error.c_str();
}

// The hooks of -fsanitize=thread.
#define ACCESSES(size)                                                                    \
    extern "C" void __tsan_read##size(void* a) { touch(a, size, false); }                 \
    extern "C" void __tsan_write##size(void* a) { touch(a, size, true); }                 \
    extern "C" void __tsan_unaligned_read##size(void* a) { touch(a, size, false, true); } \
    extern "C" void __tsan_unaligned_write##size(void* a) { touch(a, size, true, true); }

ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

extern "C" void __tsan_read_range(void* a, size_t size) { touch(a, size, false, true); }
extern "C" void __tsan_write_range(void* a, size_t size) { touch(a, size, true, true); }
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_init() {}
