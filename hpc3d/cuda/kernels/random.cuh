// The counter-based generator Philox4x64-10 (Salmon et al., SC'11), as hpc3d/ops/random.py uses
// it: block b of four 64-bit draws comes from counter b + 1, the key from the host.
#pragma once

using Word = unsigned long long;

// A block of four draws of 64 bits; `from` has the key, null where nothing is drawn.
struct Draws {
    Word key[2], block, word[4];

    __device__ explicit Draws(const Word* from)
        : key{from ? from[0] : 0, from ? from[1] : 0}, block(~0ull), word{}
    {
    }

    // The block with number `wanted`, unless it is the last one that was made.
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

    // Draw number i of the four.  Registers have no addresses: it is chosen, not indexed.
    __device__ Word draw(int i) const
    {
        const Word low = i % 2 ? word[1] : word[0], high = i % 2 ? word[3] : word[2];
        return i < 2 ? low : high;
    }

    // Number i of the sixteen draws of 16 bits: four lie in one of 64, the lowest first.
    __device__ unsigned short_draw(int i) const { return draw(i / 4) >> i % 4 * 16 & 0xffff; }
};

// Dropout of N <= 16 elements from number e on: `factor` where the draw is at least `limit`, 0
// elsewhere.  Their draws lie in one block or in two.
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
