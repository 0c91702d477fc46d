// Row-wise operations: packing of weights, RMS norm, rotary embedding with the write into the paged cache.
//
// Roundings follow transformers' modules step by step (a value is rounded to the dtype wherever the eager model
// would store a tensor), so that a checkpoint gives the same activations here as there. Each row is computed
// from its own values only, sums in a fixed tree.
//
// The cache, per layer (block index outermost, so that a block is one run of bytes to ship):
//   bf16  K [blocks][kv heads][block / 16][D / 2][16 tokens][2]   V [blocks][kv heads][block / 2][D'][2 tokens]
//   f32   K [blocks][kv heads][block / 16][D][16 tokens]          V [blocks][kv heads][block][D']
// D' is D rounded up to 16. A chunk of 16 tokens of K is a packed weight block with tokens for rows; V has
// the tokens in the place of k. Both are therefore right operands of `tile`.
#pragma once

#include "gemm.h"

namespace headgate {
namespace HEADGATE_ISA {

template <class T> HG_INLINE int64_t packed_index(int64_t row, int64_t k, int64_t K, const PackArgs& args);
template <> inline int64_t packed_index<float>(int64_t row, int64_t k, int64_t K, const PackArgs& args) {
    const int64_t block = row / kLanes * args.block_stride + args.block_offset;
    return (block * K + k) * kLanes + row % kLanes;
}
template <> inline int64_t packed_index<bf16>(int64_t row, int64_t k, int64_t K, const PackArgs& args) {
    const int64_t block = row / kLanes * args.block_stride + args.block_offset;
    return block * block_elements<bf16>(K) + k / 2 * 32 + row % kLanes * 2 + k % 2;
}

// Rows are taken 16 at a time, the rows of one block together, so that every line written is written whole.
template <class T> void pack_rows(const Runtime& runtime, const PackArgs& args) {
    const int64_t first_block = args.first_row / kLanes, end_row = args.first_row + args.count;
    const int64_t blocks = ceil_div(end_row, kLanes) - first_block;
    const int64_t padded = block_elements<T>(args.K) / kLanes;
    constexpr int64_t step = Product<T>::kDepth;  // between neighbouring rows of a block
    for_each_run_if_worth(runtime, blocks, args.count * args.K, [&](int64_t first, int64_t last) {
        for (int64_t b = first; b < last; ++b) {
            const int64_t row0 = max64(args.first_row, (first_block + b) * kLanes);
            const int64_t row1 = min64(end_row, (first_block + b + 1) * kLanes);
            const T* in = static_cast<const T*>(args.rows) + (row0 - args.first_row) * args.row_stride;
            T* out = static_cast<T*>(args.packed);
            for (int64_t k = 0; k < padded; ++k) {
                T* p = out + packed_index<T>(row0, k, args.K, args);
                for (int64_t r = 0; r < row1 - row0; ++r, p += step) {
                    if (k < args.K) memcpy(p, in + r * args.row_stride + k, sizeof(T));
                    else memset(p, 0, sizeof(T));
                }
            }
        }
    });
}

template <class T> void unpack_rows(const Runtime& runtime, const PackArgs& args) {
    for_each_run_if_worth(runtime, args.count, args.count * args.K, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            const T* in = static_cast<const T*>(args.packed);
            T* out = static_cast<T*>(args.rows) + i * args.row_stride;
            for (int64_t k = 0; k < args.K; ++k) out[k] = in[packed_index<T>(args.ids[i], k, args.K, args)];
        }
    });
}

HG_INLINE float inverse_rms(float sum_of_squares, int64_t K, float eps) {
    return 1.0f / __builtin_sqrtf(sum_of_squares / float(K) + eps);
}

// normalised value rounded, then times weight: the order of transformers' LlamaRMSNorm.
template <class T> HG_INLINE f32x16 scale_normed(f32x16 x, float inverse, f32x16 weight) {
    return mul(weight, round_to<T>(mul(x, set1(inverse))));
}

template <class T> HG_INLINE float sum_of_squares(const T* x, int64_t K) {
    f32x16 sums[4] = {zero(), zero(), zero(), zero()};
    int64_t k = 0;
    for (; k + 64 <= K; k += 64)
        HG_UNROLL for (int i = 0; i < 4; ++i) {
            f32x16 v = load(x + k + i * kLanes);
            sums[i] = fma(v, v, sums[i]);
        }
    for (; k < K; k += kLanes) {
        f32x16 v = load_n(x + k, min64(kLanes, K - k));
        sums[0] = fma(v, v, sums[0]);
    }
    return reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

// A wide weight is float32 and multiplies before the rounding, as in transformers' Gemma2RMSNorm.
template <class T>
HG_INLINE void norm_row(T* out, const T* x, const void* weight, bool wide, int64_t K, float eps) {
    const float inverse = inverse_rms(sum_of_squares(x, K), K, eps);
    for (int64_t k = 0; k < K; k += kLanes) {
        const int64_t n = min64(kLanes, K - k);
        const f32x16 value = load_n(x + k, n);
        if (wide)
            store_n(out + k, mul(load_n(static_cast<const float*>(weight) + k, n), mul(value, set1(inverse))), n);
        else
            store_n(out + k, scale_normed<T>(value, inverse, load_n(static_cast<const T*>(weight) + k, n)), n);
    }
}

template <class T> void rms_norm_rows(const Runtime& runtime, const NormArgs& args) {
    for_each_run_if_worth(runtime, args.rows, args.rows * args.K, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            const T* x = static_cast<const T*>(args.x) + i * args.x_stride;
            if (args.residual) {
                T* sum = static_cast<T*>(args.residual) + i * args.K;
                for (int64_t k = 0; k < args.K; k += kLanes) {
                    const int64_t n = min64(kLanes, args.K - k);
                    store_n(sum + k, add(load_n(sum + k, n), load_n(x + k, n)), n);
                }
                x = sum;
            }
            norm_row(static_cast<T*>(args.out) + i * args.K, x, args.weight, args.wide, args.K, args.eps);
        }
    });
}

// Where a head of a token lies in the cache: the first element, and the distances to the following ones.
struct CacheAddress {
    int64_t block, offset;  // slot = block * block_size + offset
    const KvCache& cache;
    CacheAddress(const KvCache& cache, int64_t slot)
        : block(slot / cache.block_size), offset(slot % cache.block_size), cache(cache) {}
    int64_t padded() const { return ceil_div(cache.head_size, kLanes) * kLanes; }
    int64_t k_base(int64_t head) const {
        return ((block * cache.kv_heads + head) * (cache.block_size / kLanes) + offset / kLanes) * kLanes *
               cache.head_size;
    }
    int64_t v_base(int64_t head) const { return (block * cache.kv_heads + head) * cache.block_size * padded(); }
};

template <class T> HG_INLINE T& k_element(const CacheAddress& at, int64_t head, int64_t d);
template <class T> HG_INLINE T& v_element(const CacheAddress& at, int64_t head, int64_t d);
template <> inline float& k_element<float>(const CacheAddress& at, int64_t head, int64_t d) {
    return static_cast<float*>(at.cache.k)[at.k_base(head) + d * kLanes + at.offset % kLanes];
}
template <> inline bf16& k_element<bf16>(const CacheAddress& at, int64_t head, int64_t d) {
    return static_cast<bf16*>(at.cache.k)[at.k_base(head) + d / 2 * 32 + at.offset % kLanes * 2 + d % 2];
}
template <> inline float& v_element<float>(const CacheAddress& at, int64_t head, int64_t d) {
    return static_cast<float*>(at.cache.v)[at.v_base(head) + at.offset * at.padded() + d];
}
template <> inline bf16& v_element<bf16>(const CacheAddress& at, int64_t head, int64_t d) {
    return static_cast<bf16*>(at.cache.v)[at.v_base(head) + (at.offset / 2 * at.padded() + d) * 2 + at.offset % 2];
}

// x * cos + rotate_half(x) * sin, each of the three results rounded, cos and sin rounded to T first.
template <class T> HG_INLINE void rotate(T* x, const float* cos, const float* sin, int64_t rotary) {
    const int64_t half = rotary / 2;
    for (int64_t d = 0; d < half; d += kLanes) {
        const int64_t n = min64(kLanes, half - d);
        f32x16 a = load_n(x + d, n), b = load_n(x + half + d, n);
        f32x16 cos_a = round_to<T>(load_n(cos + d, n)), cos_b = round_to<T>(load_n(cos + half + d, n));
        f32x16 sin_a = round_to<T>(load_n(sin + d, n)), sin_b = round_to<T>(load_n(sin + half + d, n));
        store_n(x + d, sub(round_to<T>(mul(a, cos_a)), round_to<T>(mul(b, sin_a))), n);
        store_n(x + half + d, add(round_to<T>(mul(b, cos_b)), round_to<T>(mul(a, sin_b))), n);
    }
}

template <class T> void rope_and_write_tokens(const Runtime& runtime, const RopeArgs& args) {
    const int64_t D = args.cache.head_size, HK = args.cache.kv_heads, all = args.heads + 2 * HK;
    for_each_run_if_worth(runtime, args.tokens, args.tokens * all * D, [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; ++t) {
            T* heads = static_cast<T*>(args.qkv) + t * args.qkv_stride;
            const float* cos = args.cos + args.positions[t] * args.rotary;
            const float* sin = args.sin + args.positions[t] * args.rotary;
            for (int64_t h = 0; h < args.heads + HK; ++h) {
                T* head = heads + h * D;
                const void* weight = h < args.heads ? args.q_weight : args.k_weight;
                if (weight) norm_row(head, head, weight, args.wide, D, args.eps);
                rotate(head, cos, sin, args.rotary);
            }
            if (args.slots[t] < 0) continue;
            const CacheAddress at(args.cache, args.slots[t]);
            for (int64_t h = 0; h < HK; ++h) {
                const T* k = heads + (args.heads + h) * D;
                const T* v = k + HK * D;
                for (int64_t d = 0; d < D; ++d) k_element<T>(at, h, d) = k[d];
                for (int64_t d = 0; d < D; ++d) v_element<T>(at, h, d) = v[d];
            }
        }
    });
}

template <class T> void copy_kv_tokens(const Runtime& runtime, const CopyKvArgs& args) {
    const int64_t D = args.cache.head_size, HK = args.cache.kv_heads;
    const auto copy = [&](T& plain, T& cached) { (args.to_cache ? cached = plain : plain = cached); };
    for_each_run_if_worth(runtime, args.tokens, args.tokens * HK * D, [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; ++t) {
            const CacheAddress at(args.cache, args.slots[t]);
            for (int64_t h = 0; h < HK; ++h)
                for (int64_t d = 0; d < D; ++d) {
                    copy(static_cast<T*>(args.k)[(t * HK + h) * D + d], k_element<T>(at, h, d));
                    copy(static_cast<T*>(args.v)[(t * HK + h) * D + d], v_element<T>(at, h, d));
                }
        }
    });
}

}  // namespace HEADGATE_ISA
}  // namespace headgate
