// Counter-based generator Philox4x64-10 (Salmon et al., SC'11), with the same numbers as in
// hpc3d/ops/random.py. Counter b + 1 yields block b of four 64-bit numbers. The host sets the key.
#pragma once

using Word = unsigned long long;

// Block of four 64-bit random numbers. `from` points to the key; it is null if no number is drawn.
struct Draws {
    Word key[2], block, word[4];

    __device__ explicit Draws(const Word* from)
        : key{from ? from[0] : 0, from ? from[1] : 0}, block(~0ull), word{}
    {
    }

    // Generate the block with index `wanted`, unless it is the current block.
    __device__ void make(Word wanted)
    {
        if (wanted == block)
            return;
        const Word m0 = 0xD2E7470EE14C6C93ull, m1 = 0xCA5A826395121157ull;
        Word a = wanted + 1, b = 0, c = 0, d = 0, k0 = key[0], k1 = key[1];
#pragma unroll
        for (int round = 0; round < 10; round++) {
            const Word high0 = __umul64hi(m0, a), high1 = __umul64hi(m1, c);
            const Word low0 = m0 * a, low1 = m1 * c;
            a = high1 ^ b ^ k0, b = low1, c = high0 ^ d ^ k1, d = low0;
            k0 += 0x9E3779B97F4A7C15ull, k1 += 0xBB67AE8584CAA73Bull;
        }
        block = wanted;
        word[0] = a, word[1] = b, word[2] = c, word[3] = d;
    }

    // Return number i of the block. Registers cannot be indexed, so the number is selected.
    __device__ Word draw(int i) const
    {
        const Word low = i % 2 ? word[1] : word[0], high = i % 2 ? word[3] : word[2];
        return i < 2 ? low : high;
    }

    // Return 16-bit number i of the block. Each 64-bit number contains four, lowest bits first.
    __device__ unsigned short_draw(int i) const { return draw(i / 4) >> i % 4 * 16 & 0xffff; }
};

// Return the dropout factors of N <= 16 elements, starting with element e: `factor` if the random
// number is at least `limit`, otherwise 0. The numbers are in one block or in two adjacent blocks.
template <int N>
__device__ Pack<N> dropout(Draws& draws, Word e, unsigned limit, float factor)
{
    Pack<N> factors;
    const int head = e % 16;
#pragma unroll 1
    for (int skipped = 0; skipped < head + N; skipped += 16) {
        draws.make((e + skipped) / 16);
#pragma unroll
        for (int i = 0; i < N; i++)
            if ((head + i) / 16 == skipped / 16)
                factors[i] = draws.short_draw((head + i) % 16) < limit ? 0 : factor;
    }
    return factors;
}
