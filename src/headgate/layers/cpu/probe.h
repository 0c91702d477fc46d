// Limits of the machine, for benchmarks: memory bandwidth, and multiplication of data already in L1.
#pragma once

#include "amx.h"
#include "gemm.h"

namespace headgate {
namespace HEADGATE_ISA {

// Reads every line once, with all threads.
HG_INLINE void read_everything(const Runtime& runtime, const void* data, int64_t bytes) {
    constexpr int64_t kUnit = 1 << 18, kAhead = 1 << 12;
    for_each_run(runtime, bytes / kUnit, [&](int64_t first, int64_t last) {
        const char* p = static_cast<const char*>(data);
        i32x16 sums[4] = {iset1(0), iset1(0), iset1(0), iset1(0)};
        for (int64_t i = first * kUnit; i < last * kUnit; i += 256)
            HG_UNROLL for (int j = 0; j < 4; ++j) {
                prefetch(p + i + j * 64 + kAhead);
                sums[j] = iadd(sums[j], iload(p + i + j * 64));
            }
        volatile float sink = reduce_add(as_float(ior(ior(sums[0], sums[1]), ior(sums[2], sums[3]))));
        (void)sink;
    });
}

// The inner step of the widest tile on a few lines of L1, on every thread. Returns the number of operations.
template <class T> int64_t multiply_vectors(const Runtime& runtime, int64_t steps) {
    constexpr int kWide = kMaxWide / kMaxRows;
    for_each_run(runtime, runtime.threads, [&](int64_t first, int64_t last) {
        alignas(64) T right[64 * kWide] = {};
        typename Product<T>::Left left[kMaxRows * 2] = {};
        alignas(64) float sums[kMaxRows * kWide * kLanes];
        const T* columns[kWide];
        for (int j = 0; j < kWide; ++j) columns[j] = right + 32 * j;
        // The compiler must neither know the operands nor see that the sums are unused: it would drop all but one
        // of them and report a multiple of what the machine can do.
        asm volatile("" ::"r"(left), "r"(right), "r"(columns) : "memory");
        for (int64_t unit = first; unit < last; ++unit) {
            tile<T, kMaxRows, kWide, 1, 0>({sums, false, left, columns, 1, steps, 0, {}});
            asm volatile("" ::"r"(sums) : "memory");
        }
    });
    return runtime.threads * steps * kMaxRows * kWide * kLanes * Product<T>::kDepth * 2;
}

template <class Tiles> int64_t multiply_tiles(const Runtime& runtime, int64_t steps) {
    for_each_run(runtime, runtime.threads, [&](int64_t first, int64_t last) {
        alignas(64) bf16 zeros[kTileElements] = {};
        Tiles tiles;
        tiles.configure();
        Tiles::template load<4>(tiles, zeros), Tiles::template load<5>(tiles, zeros);
        Tiles::template clear<0>(tiles), Tiles::template clear<1>(tiles);
        Tiles::template clear<2>(tiles), Tiles::template clear<3>(tiles);
        for (int64_t i = 0; i < (last - first) * steps; ++i) {
            Tiles::template multiply<0, 4, 5>(tiles), Tiles::template multiply<1, 4, 5>(tiles);
            Tiles::template multiply<2, 4, 5>(tiles), Tiles::template multiply<3, 4, 5>(tiles);
            asm volatile("" ::"r"(&tiles) : "memory");
        }
        tiles.release();
    });
    return runtime.threads * steps * 4 * 16 * 16 * kTileDepth * 2;
}

}  // namespace HEADGATE_ISA
}  // namespace headgate
