// Matrix products on vector registers: the tile that everything shares, and the packed linear layer.
//
// A weight block is 16 output rows, laid out so that one load yields the same k (bf16: the same pair of k) of
// all 16; see `Product` for the steps. An output element is one chain of additions over k, in order, from zero:
// it cannot depend on how many rows or columns are computed beside it. Keep it so.
#pragma once

#include "parallel.h"
#include "simd.h"

namespace headgate {
namespace HEADGATE_ISA {

// How operands of type T meet. One step multiplies kDepth consecutive k; the left operand is stored as kEntries
// values of type Left per row and step, ready to be broadcast; the right one as 16 columns times kDepth.
template <class T> struct Product;

template <> struct Product<float> {
    using Left = float;
    static constexpr int kDepth = 1, kEntries = 1;
    template <int MR, int NV, int XR, int XS>
    HG_INLINE void step(f32x16 (&acc)[MR][NV], const Left* x, const float* const (&w)[NV]) {
        f32x16 right[NV];
        HG_UNROLL for (int j = 0; j < NV; ++j) right[j] = load(w[j]);
        HG_UNROLL for (int r = 0; r < MR; ++r) {
            f32x16 left = set1(x[r * XR]);
            HG_UNROLL for (int j = 0; j < NV; ++j) acc[r][j] = fma(left, right[j], acc[r][j]);
        }
    }
};

#if defined(__AVX512BF16__)
template <> struct Product<bf16> {
    using Left = uint32_t;  // a pair of bf16
    static constexpr int kDepth = 2, kEntries = 1;
    template <int MR, int NV, int XR, int XS>
    HG_INLINE void step(f32x16 (&acc)[MR][NV], const Left* x, const bf16* const (&w)[NV]) {
        __m512bh right[NV];
        HG_UNROLL for (int j = 0; j < NV; ++j) right[j] = (__m512bh)iload(w[j]);
        HG_UNROLL for (int r = 0; r < MR; ++r) {
            __m512bh left = (__m512bh)iset1(x[r * XR]);
            HG_UNROLL for (int j = 0; j < NV; ++j) acc[r][j] = _mm512_dpbf16_ps(acc[r][j], left, right[j]);
        }
    }
};
#else
// Without bf16 instructions: a bf16 is the upper half of a float, so each pair is two multiply-adds.
template <> struct Product<bf16> {
    using Left = float;
    static constexpr int kDepth = 2, kEntries = 2;
    template <int MR, int NV, int XR, int XS>
    HG_INLINE void step(f32x16 (&acc)[MR][NV], const Left* x, const bf16* const (&w)[NV]) {
        f32x16 right[NV];
        HG_UNROLL for (int j = 0; j < NV; ++j) right[j] = as_float(shift_left<16>(iload(w[j])));
        HG_UNROLL for (int r = 0; r < MR; ++r) {
            f32x16 left = set1(x[r * XR]);
            HG_UNROLL for (int j = 0; j < NV; ++j) acc[r][j] = fma(left, right[j], acc[r][j]);
        }
        HG_UNROLL for (int j = 0; j < NV; ++j) right[j] = as_float(iand(iload(w[j]), iset1(0xffff0000)));
        HG_UNROLL for (int r = 0; r < MR; ++r) {
            f32x16 left = set1(x[r * XR + XS]);
            HG_UNROLL for (int j = 0; j < NV; ++j) acc[r][j] = fma(left, right[j], acc[r][j]);
        }
    }
};
#endif

// 32 registers hold 12 x 2 sums with room for the operands; AVX2's 16 half-wide ones hold 6 x 1.
#if defined(__AVX512F__)
constexpr int kMaxRows = 12, kMaxWide = 24;
#else
constexpr int kMaxRows = 6, kMaxWide = 6;
#endif

// Right operands that a tile asks the cache for while it computes: what the next tile will read. Only steps with
// (step & mask) == phase ask, so that several tiles share the work evenly.
template <class T> struct Ahead {
    const T* const* next = nullptr;
    int64_t mask = 0, phase = -1;
};

// sums[NV][MR][16] (+)= left[MR rows] x right, where right is `segments` runs of `steps` steps, the run s of
// column block j starting at right[s * NV + j] and advancing by `pitch` elements a step.
template <class T> struct TileCall {
    float* sums;
    bool accumulate;
    const typename Product<T>::Left* left;
    const T* const* right;
    int64_t segments, steps, pitch;
    Ahead<T> ahead;
};

// XR and XS: distance in `left` between rows and between consecutive entries of one row.
template <class T, int MR, int NV, int XR, int XS> void tile(const TileCall<T>& call) {
    using P = Product<T>;
    f32x16 acc[MR][NV];
    if (call.accumulate) {
        HG_UNROLL for (int j = 0; j < NV; ++j)
            HG_UNROLL for (int r = 0; r < MR; ++r) acc[r][j] = load(call.sums + (j * MR + r) * kLanes);
    } else {
        HG_UNROLL for (int j = 0; j < NV; ++j)
            HG_UNROLL for (int r = 0; r < MR; ++r) acc[r][j] = zero();
    }
    const auto* x = call.left;
    const int64_t pitch = call.pitch;
    for (int64_t s = 0; s < call.segments; ++s) {
        const T* w[NV];
        HG_UNROLL for (int j = 0; j < NV; ++j) w[j] = call.right[s * NV + j];
        for (int64_t k = 0; k < call.steps; ++k) {
            if ((k & call.ahead.mask) == call.ahead.phase) {
                HG_UNROLL for (int j = 0; j < NV; ++j) prefetch(call.ahead.next[s * NV + j] + k * pitch);
            }
            P::template step<MR, NV, XR, XS>(acc, x, w);
            HG_UNROLL for (int j = 0; j < NV; ++j) w[j] += pitch;
            x += P::kEntries * XS;
        }
    }
    HG_UNROLL for (int j = 0; j < NV; ++j)
        HG_UNROLL for (int r = 0; r < MR; ++r) store(call.sums + (j * MR + r) * kLanes, acc[r][j]);
}

template <class T> using TileFunction = void (*)(const TileCall<T>&);

// The instantiations for 1 .. kMaxRows rows. `kRowMajor` is the row length of a row-major left operand, or 0 for
// a packed one, where the rows of one step lie side by side.
template <class T, int NV, int kRowMajor, int MR> struct TileFor {
    static constexpr bool kFits = MR * NV <= kMaxWide || NV == 1;
    static constexpr int kNV = kFits ? NV : 1;  // never called when it does not fit
    static constexpr TileFunction<T> function = tile<T, MR, kNV, kRowMajor ? kRowMajor : 1, kRowMajor ? 1 : MR>;
};

template <class T, int NV, int kRowMajor> HG_INLINE TileFunction<T> tile_for(int64_t rows) {
    static constexpr TileFunction<T> functions[] = {
        nullptr,
        TileFor<T, NV, kRowMajor, 1>::function, TileFor<T, NV, kRowMajor, 2>::function,
        TileFor<T, NV, kRowMajor, 3>::function, TileFor<T, NV, kRowMajor, 4>::function,
        TileFor<T, NV, kRowMajor, 5>::function, TileFor<T, NV, kRowMajor, 6>::function,
#if defined(__AVX512F__)
        TileFor<T, NV, kRowMajor, 7>::function, TileFor<T, NV, kRowMajor, 8>::function,
        TileFor<T, NV, kRowMajor, 9>::function, TileFor<T, NV, kRowMajor, 10>::function,
        TileFor<T, NV, kRowMajor, 11>::function, TileFor<T, NV, kRowMajor, 12>::function,
#endif
    };
    return functions[rows];
}

// The widest of 4, 2, 1 column blocks that `blocks` and the registers allow beside `rows` rows.
HG_INLINE int64_t widest(int64_t rows, int64_t blocks) {
    if (blocks >= 4 && rows * 4 <= kMaxWide) return 4;
    return blocks >= 2 && rows * 2 <= kMaxWide ? 2 : 1;
}

template <class T, int kRowMajor> HG_INLINE void run_tile(int64_t rows, int64_t wide, const TileCall<T>& call) {
    if (wide == 4) return tile_for<T, 4, kRowMajor>(rows)(call);
    if (wide == 2) return tile_for<T, 2, kRowMajor>(rows)(call);
    return tile_for<T, 1, kRowMajor>(rows)(call);
}

// Rows are shared out evenly over as few tiles as possible: 16 rows are 8 + 8, not 12 + 4.
struct RowTiles {
    int64_t rows, count;
    explicit RowTiles(int64_t rows) : rows(rows), count(ceil_div(rows, kMaxRows)) {}
    int64_t start(int64_t t) const { return t * (rows / count) + min64(t, rows % count); }
    int64_t size(int64_t t) const { return start(t + 1) - start(t); }
};

template <class T> HG_INLINE int64_t steps_of(int64_t K) { return ceil_div(K, Product<T>::kDepth); }

// Entries of one row of a left operand of length K.
template <class T> HG_INLINE int64_t entries_of(int64_t K) { return steps_of<T>(K) * Product<T>::kEntries; }

// out[entry * stride] = entries of one row; a last odd k is paired with zero.
HG_INLINE void pack_left(float* out, int64_t stride, const float* row, int64_t K) {
    for (int64_t k = 0; k < K; ++k) out[k * stride] = row[k];
}
HG_INLINE void pack_left(float* out, int64_t stride, const bf16* row, int64_t K) {
    for (int64_t k = 0; k < K; ++k) out[k * stride] = scalar_from(row[k]);
    if (K % 2) out[K * stride] = 0.0f;
}
HG_INLINE void pack_left(uint32_t* out, int64_t stride, const bf16* row, int64_t K) {
    for (int64_t k = 0; k < K / 2; ++k) memcpy(out + k * stride, row + 2 * k, 4);
    if (K % 2) out[K / 2 * stride] = row[K - 1].bits;
}

// Elements of one packed block of 16 weight rows. bf16 is padded to whole AMX tiles, 32 deep.
template <class T> HG_INLINE int64_t block_elements(int64_t K);
template <> inline int64_t block_elements<float>(int64_t K) { return K * kLanes; }
template <> inline int64_t block_elements<bf16>(int64_t K) { return ceil_div(K, 32) * 32 * kLanes; }

// The left operand, followed by its sums over groups of at least 16 columns (blocks.h).
HG_INLINE int64_t left_bytes(int64_t M, int64_t K) { return ceil_div(M, 16) * 16 * ceil_div(K, 32) * 32 * 4; }
HG_INLINE int64_t linear_scratch_bytes(int64_t M, int64_t K) { return left_bytes(M, K) + M * ceil_div(K, 16) * 4; }

// silu(gate) * up with the roundings of `F.silu(gate) * up` in T.
template <class T> HG_INLINE f32x16 silu_mul(f32x16 gate, f32x16 up) {
    gate = round_to<T>(gate);
    f32x16 silu = div(gate, add(set1(1.0f), exp(sub(zero(), gate))));
    return mul(round_to<T>(silu), round_to<T>(up));
}

// The same with `F.gelu(gate, approximate="tanh")`, which is gate * sigmoid(2 u).
template <class T> HG_INLINE f32x16 gelu_mul(f32x16 gate, f32x16 up) {
    gate = round_to<T>(gate);
    const f32x16 cube = mul(mul(gate, gate), gate);
    const f32x16 twice_u = mul(set1(1.5957691216f), fma(cube, set1(0.044715f), gate));
    const f32x16 gelu = div(gate, add(set1(1.0f), exp(sub(zero(), twice_u))));
    return mul(round_to<T>(gelu), round_to<T>(up));
}

// gate * sigmoid(alpha * gate) * (up + 1) of clamped values, with the roundings of torch's eager operations in T.
template <class T> HG_INLINE f32x16 clamped_mul(f32x16 gate, f32x16 up, const Gating& gating) {
    const f32x16 limit = set1(gating.limit);
    gate = vmin(round_to<T>(gate), limit);
    up = vmax(vmin(round_to<T>(up), limit), sub(zero(), limit));
    const f32x16 scaled = round_to<T>(mul(gate, set1(gating.alpha)));
    const f32x16 sigmoid = round_to<T>(div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), scaled)))));
    return mul(round_to<T>(add(up, set1(1.0f))), round_to<T>(mul(gate, sigmoid)));
}

template <class T> HG_INLINE f32x16 gated(f32x16 gate, f32x16 up, const Gating& gating) {
    if (gating.gate == Gate::clamped) return clamped_mul<T>(gate, up, gating);
    return gating.gate == Gate::gelu ? gelu_mul<T>(gate, up) : silu_mul<T>(gate, up);
}

HG_INLINE bool is_gated(const LinearArgs& args) { return args.gating.gate != Gate::none; }

template <class Out>
HG_INLINE void store_row(void* out, int64_t offset, f32x16 value, int64_t n) {
    Out* p = static_cast<Out*>(out) + offset;
    if (n >= kLanes) store(p, value);
    else store_n(p, value, n);
}

// Sums of `wide` blocks from `block` on, rows from `row` on, to the output: bias and gate, one rounding.
// sums[j][r][16] with `pitch` floats between the column blocks.
template <class T>
HG_INLINE void finish(const LinearArgs& args, const float* sums, int64_t pitch, int64_t row, int64_t rows,
                      int64_t block, int64_t wide) {
    const int64_t take = is_gated(args) ? 2 : 1;
    for (int64_t j = 0; j < wide; j += take) {
        const int64_t column = (block + j) / take * kLanes;
        const int64_t n = min64(kLanes, args.N - column);
        const T* bias = static_cast<const T*>(args.bias);
        const f32x16 add_first = bias ? load_n(bias + column, n) : zero();
        const f32x16 add_second = bias && is_gated(args) ? load_n(bias + args.N + column, n) : zero();
        for (int64_t r = 0; r < rows; ++r) {
            f32x16 value = add(load(sums + j * pitch + r * kLanes), add_first);
            if (is_gated(args))
                value = gated<T>(value, add(load(sums + (j + 1) * pitch + r * kLanes), add_second), args.gating);
            const int64_t offset = (row + r) * args.out_stride + column;
            if (args.out_dtype == Dtype::bf16) store_row<bf16>(args.out, offset, value, n);
            else store_row<float>(args.out, offset, value, n);
        }
    }
}

HG_INLINE int64_t block_count(const LinearArgs& args) {
    return ceil_div(args.N, kLanes) * (is_gated(args) ? 2 : 1);
}

// `wide` blocks for all rows. The blocks stay in L2 while every row tile passes over them.
template <class T>
void linear_blocks(const LinearArgs& args, int64_t block, int64_t wide, bool more_follow) {
    using Left = typename Product<T>::Left;
    alignas(64) float sums[kMaxWide * 2 * kLanes];
    const T* weight = static_cast<const T*>(args.weight);
    const int64_t elements = block_elements<T>(args.K);
    const T *right[4], *next[4];
    for (int64_t j = 0; j < wide; ++j) {
        right[j] = weight + (block + j) * elements;
        next[j] = right[j] + wide * elements;
    }
    const RowTiles tiles(args.M);
    int64_t sharing = 1;  // tiles that share the prefetching, a power of two
    while (sharing * 2 <= tiles.count) sharing *= 2;
    for (int64_t t = 0; t < tiles.count; ++t) {
        const int64_t row = tiles.start(t), rows = tiles.size(t);
        const Left* left = static_cast<const Left*>(args.scratch) + row * entries_of<T>(args.K);
        const int64_t fits = widest(rows, wide);
        for (int64_t j = 0; j < wide; j += fits) {
            Ahead<T> ahead;
            if (more_follow && t < sharing) ahead = {next + j, sharing - 1, t};
            run_tile<T, 0>(rows, fits, {sums + j * rows * kLanes, false, left, right + j, 1, steps_of<T>(args.K),
                                        Product<T>::kDepth * kLanes, ahead});
        }
        finish<T>(args, sums, rows * kLanes, row, rows, block, wide);
    }
}

// Row `row` of a product's left operand.
template <class T> HG_INLINE const T* left_row(const LinearArgs& args, int64_t row) {
    return static_cast<const T*>(args.x) + (args.rows ? args.rows[row] : row) * args.x_stride;
}

// Calls visit(product, first, last) on runs that cover 0 .. units(product) of every product exactly once.
template <class Units, class Visit>
HG_INLINE void for_each_part(const Runtime& runtime, const LinearArgs* products, int64_t count, Units units,
                             Visit visit) {
    int64_t all = 0;
    for (int64_t i = 0; i < count; ++i) all += units(products[i]);
    for_each_run(runtime, all, [&](int64_t first, int64_t last) {
        int64_t start = 0;
        for (int64_t i = 0; i < count && start < last; ++i) {
            const int64_t own = units(products[i]);
            if (start + own > first) visit(products[i], max64(first - start, 0), min64(last - start, own));
            start += own;
        }
    });
}

// The same, but on one thread if the products have too few rows to wake the others.
template <class Units, class Visit>
HG_INLINE void for_each_left_part(const Runtime& runtime, const LinearArgs* products, int64_t count, Units units,
                                  Visit visit) {
    int64_t elements = 0;
    for (int64_t i = 0; i < count; ++i) elements += products[i].M * products[i].K;
    if (elements >= kWorthWaking) return for_each_part(runtime, products, count, units, visit);
    for (int64_t i = 0; i < count; ++i) visit(products[i], int64_t(0), units(products[i]));
}

}  // namespace HEADGATE_ISA
}  // namespace headgate
