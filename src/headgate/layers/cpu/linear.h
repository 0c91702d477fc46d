// The linear layer on vector registers: prepares the left operands, and shares the blocks of rows among threads.
#pragma once

#include "blocks.h"
#include "gemm.h"

namespace headgate {
namespace HEADGATE_ISA {

template <class T> void pack_left_tiles(const LinearArgs& args, int64_t first, int64_t last) {
    using Left = typename Product<T>::Left;
    const RowTiles tiles(args.M);
    for (int64_t t = first; t < last; ++t) {
        const int64_t row = tiles.start(t), rows = tiles.size(t);
        Left* out = static_cast<Left*>(args.scratch) + row * entries_of<T>(args.K);
        for (int64_t r = 0; r < rows; ++r) pack_left(out + r, rows, left_row<T>(args, row + r), args.K);
        if (args.stored != Stored::numbers && kind_of(args.stored).minima) sum_left_tile<T>(args, row, rows);
    }
}

// How many blocks are computed side by side. A gate needs its pair of blocks in one group, even where the registers
// hold one block at a time (AVX2).
HG_INLINE int64_t group_width(const LinearArgs& args) {
    return max64(widest(RowTiles(args.M).size(0), block_count(args)), is_gated(args) ? 2 : 1);
}

template <class T> void linear_blocks_as_stored(const LinearArgs& args, int64_t block, int64_t wide, bool more_follow) {
    if (args.stored == Stored::numbers) linear_blocks<T>(args, block, wide, more_follow);
    else linear_packed_blocks<T>(args, block, wide);
}

template <class T> void linear_groups(const LinearArgs& args, int64_t first, int64_t last) {
    const int64_t blocks = block_count(args), wide = group_width(args);
    for (int64_t g = first; g < last; ++g) {
        int64_t block = g * wide, end = min64(blocks, block + wide);
        const bool more = g + 1 < last && (g + 2) * wide <= blocks;
        if (end - block == wide) {
            linear_blocks_as_stored<T>(args, block, wide, more);
            continue;
        }
        for (int64_t step = is_gated(args) ? 2 : 1; block < end; block += step)
            linear_blocks_as_stored<T>(args, block, step, false);
    }
}

template <class T> void linear_vector(const Runtime& runtime, const LinearArgs* products, int64_t count) {
    for_each_left_part(
        runtime, products, count, [](const LinearArgs& args) { return RowTiles(args.M).count; }, pack_left_tiles<T>);
    for_each_part(
        runtime, products, count,
        [](const LinearArgs& args) { return ceil_div(block_count(args), group_width(args)); }, linear_groups<T>);
}

}  // namespace HEADGATE_ISA
}  // namespace headgate
