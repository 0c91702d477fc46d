// The packed bf16 linear layer on AMX: 16 x 16 sums per tile register, 32 deep.
//
// The tile instructions are behind `HardwareTiles`; `EmulatedTiles` does the same in plain C++, so that packing,
// tiling and edges are tested on machines without AMX. An output element is one chain over k in either, whatever
// the number of rows: one row and 512 rows run through the same instructions. Weights are laid out so that a
// B tile is 1 KiB of consecutive memory.
#pragma once

#include "linear.h"

namespace headgate {
namespace HEADGATE_ISA {

constexpr int64_t kTileDepth = 32;
constexpr int64_t kTileElements = 16 * kTileDepth;  // of an A tile (16 rows x 32) or a B tile (16 pairs x 16 x 2)

// Written as assembly because the compiler's intrinsics want literal register numbers, not template arguments.
struct HardwareTiles {
    struct __attribute__((packed)) Config {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    };
    void configure() {
        alignas(64) Config config;
        for (int i = 0; i < 8; ++i) config.row_bytes[i] = 64, config.rows[i] = 16;
        asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
    }
    void release() { asm volatile("tilerelease" ::: "memory"); }
    template <int C> HG_INLINE void clear(HardwareTiles&) {
        asm volatile("tilezero %%tmm%c0" ::"i"(C) : "memory");
    }
    template <int T> HG_INLINE void load(HardwareTiles&, const bf16* p) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(int64_t(64)), "i"(T) : "memory");
    }
    template <int C, int A, int B> HG_INLINE void multiply(HardwareTiles&) {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B) : "memory");
    }
    template <int C> HG_INLINE void save(HardwareTiles&, float* p) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(int64_t(64)), "i"(C) : "memory");
    }
};

struct EmulatedTiles {
    uint8_t data[8][1024];
    bool configured = false;
    void configure() { configured = true; }
    void release() { configured = false; }
    template <int C> static void clear(EmulatedTiles& self) { memset(self.data[C], 0, 1024); }
    template <int T> static void load(EmulatedTiles& self, const bf16* p) {
        if (!self.configured) __builtin_trap();
        memcpy(self.data[T], p, 1024);
    }
    template <int C, int A, int B> static void multiply(EmulatedTiles& self) {
        bf16 a[16][32], b[16][16][2];
        float c[16][16];
        memcpy(a, self.data[A], 1024), memcpy(b, self.data[B], 1024), memcpy(c, self.data[C], 1024);
        for (int row = 0; row < 16; ++row)
            for (int pair = 0; pair < 16; ++pair)
                for (int n = 0; n < 16; ++n)
                    for (int half = 0; half < 2; ++half)
                        c[row][n] += scalar_from(a[row][2 * pair + half]) * scalar_from(b[pair][n][half]);
        memcpy(self.data[C], c, 1024);
    }
    template <int C> static void save(EmulatedTiles& self, float* p) { memcpy(p, self.data[C], 1024); }
};

// Strips of 16 rows to A tiles, [M / 16][K / 32][16][32], zero beyond M and K.
HG_INLINE void pack_a_strips(const LinearArgs& args, int64_t first, int64_t last) {
    const int64_t depth = ceil_div(args.K, kTileDepth);
    for (int64_t strip = first; strip < last; ++strip)
        for (int64_t r = 0; r < 16; ++r) {
            const int64_t row = strip * 16 + r;
            bf16* out = static_cast<bf16*>(args.scratch) + (strip * depth * 16 + r) * kTileDepth;
            const bf16* in = row < args.M ? left_row<bf16>(args, row) : nullptr;
            for (int64_t d = 0; d < depth; ++d, out += kTileElements) {
                const int64_t n = in ? min64(kTileDepth, args.K - d * kTileDepth) : 0;
                if (n) memcpy(out, in + d * kTileDepth, size_t(n) * 2);
                memset(out + n, 0, size_t(kTileDepth - n) * 2);
            }
        }
}

HG_INLINE void prefetch_tile(const bf16* p) {
    HG_UNROLL for (int line = 0; line < 16; ++line) prefetch_to_l1(p + line * 32);
}

// How far the weights are fetched ahead of their use, in tiles of one block: near enough to stay in L1.
constexpr int64_t kTilesAhead = 8;

// Up to 16 rows: four weight blocks side by side, because a single sum would stall on its own result.
template <class Tiles>
void amx_strip_by_four(Tiles& tiles, const bf16* a, const bf16* const (&b)[4], int64_t depth, float* sums) {
    Tiles::template clear<0>(tiles), Tiles::template clear<1>(tiles);
    Tiles::template clear<2>(tiles), Tiles::template clear<3>(tiles);
    for (int64_t d = 0; d < depth; ++d) {
        const int64_t at = d * kTileElements;
        Tiles::template load<4>(tiles, a + at);
        Tiles::template load<5>(tiles, b[0] + at), Tiles::template multiply<0, 4, 5>(tiles);
        Tiles::template load<6>(tiles, b[1] + at), Tiles::template multiply<1, 4, 6>(tiles);
        Tiles::template load<7>(tiles, b[2] + at), Tiles::template multiply<2, 4, 7>(tiles);
        Tiles::template load<5>(tiles, b[3] + at), Tiles::template multiply<3, 4, 5>(tiles);
        for (int j = 0; j < 4; ++j) prefetch_tile(b[j] + at + kTilesAhead * kTileElements);
    }
    Tiles::template save<0>(tiles, sums), Tiles::template save<1>(tiles, sums + 256);
    Tiles::template save<2>(tiles, sums + 512), Tiles::template save<3>(tiles, sums + 768);
}

// Up to 32 rows: two strips by two weight blocks, each loaded tile used twice. sums[block][32 rows][16].
template <class Tiles>
void amx_two_by_two(Tiles& tiles, const bf16* const (&a)[2], const bf16* const (&b)[2], int64_t depth, bool cold,
                    float* sums) {
    Tiles::template clear<0>(tiles), Tiles::template clear<1>(tiles);
    Tiles::template clear<2>(tiles), Tiles::template clear<3>(tiles);
    for (int64_t d = 0; d < depth; ++d) {
        const int64_t at = d * kTileElements;
        Tiles::template load<4>(tiles, a[0] + at);
        Tiles::template load<6>(tiles, b[0] + at), Tiles::template multiply<0, 4, 6>(tiles);
        Tiles::template load<7>(tiles, b[1] + at), Tiles::template multiply<2, 4, 7>(tiles);
        Tiles::template load<5>(tiles, a[1] + at);
        Tiles::template multiply<1, 5, 6>(tiles), Tiles::template multiply<3, 5, 7>(tiles);
        if (cold)
            for (int j = 0; j < 2; ++j) prefetch_tile(b[j] + at + kTilesAhead * kTileElements);
    }
    Tiles::template save<0>(tiles, sums), Tiles::template save<1>(tiles, sums + 256);
    Tiles::template save<2>(tiles, sums + 512), Tiles::template save<3>(tiles, sums + 768);
}

HG_INLINE int64_t tile_group_width(const LinearArgs& args) { return args.M <= 16 ? 4 : 2; }

template <class Tiles> void linear_tile_groups(const LinearArgs& args, int64_t first, int64_t last) {
    const bf16* x = static_cast<const bf16*>(args.scratch);
    const bf16* weight = static_cast<const bf16*>(args.weight);
    const int64_t depth = ceil_div(args.K, kTileDepth), blocks = block_count(args), wide = tile_group_width(args);
    alignas(64) float sums[4 * 256];
    Tiles tiles;
    tiles.configure();
    for (int64_t group = first; group < last; ++group) {
        const int64_t block = group * wide, present = min64(wide, blocks - block);
        // A missing block of the last group repeats the one before; its sums are not used.
        const auto at = [&](int64_t j) { return weight + (block + min64(j, present - 1)) * depth * kTileElements; };
        if (wide == 4) {
            const bf16* const b[4] = {at(0), at(1), at(2), at(3)};
            amx_strip_by_four(tiles, x, b, depth, sums);
            finish<bf16>(args, sums, 256, 0, args.M, block, present);
            continue;
        }
        const bf16* const b[2] = {at(0), at(1)};
        for (int64_t row = 0; row < args.M; row += 32) {
            const bf16* strip = x + row * depth * kTileDepth;
            const bool second = row + 16 < args.M;
            const bf16* const a[2] = {strip, second ? strip + depth * kTileElements : strip};
            amx_two_by_two(tiles, a, b, depth, row == 0, sums);
            finish<bf16>(args, sums, 512, row, min64(32, args.M - row), block, present);
        }
    }
    tiles.release();
}

template <class Tiles> void linear_tiles(const Runtime& runtime, const LinearArgs* products, int64_t count) {
    for_each_left_part(
        runtime, products, count, [](const LinearArgs& args) { return ceil_div(args.M, 16); }, pack_a_strips);
    for_each_part(
        runtime, products, count,
        [](const LinearArgs& args) { return ceil_div(block_count(args), tile_group_width(args)); },
        linear_tile_groups<Tiles>);
}

}  // namespace HEADGATE_ISA
}  // namespace headgate
