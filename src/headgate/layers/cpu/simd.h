// Sixteen float lanes on every machine.
//
// Every kernel is written once against `f32x16`, and this file is compiled once per instruction set: one register
// with AVX-512, two with AVX2. All names are in a separate namespace per instruction set, and the files compiled with
// such flags include no torch and no standard-library templates. Otherwise the linker could keep an inline function
// of the same name compiled for AVX-512, which would crash on an older CPU. Lane counts, reduction trees and rounding
// are the same everywhere and part of the batch-invariance guarantee.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define HG_INLINE static inline __attribute__((always_inline))
#define HG_UNROLL _Pragma("GCC unroll 16")

namespace headgate {
namespace HEADGATE_ISA {

struct bf16 {
    uint16_t bits;
};

HG_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
HG_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
HG_INLINE float max32(float a, float b) { return a > b ? a : b; }
HG_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

HG_INLINE float scalar_from(float v) { return v; }
HG_INLINE float scalar_from(bf16 v) {
    uint32_t bits = uint32_t(v.bits) << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

#if defined(__AVX512F__)

using f32x16 = __m512;
using i32x16 = __m512i;
using mask16 = __mmask16;

HG_INLINE f32x16 zero() { return _mm512_setzero_ps(); }
HG_INLINE f32x16 set1(float v) { return _mm512_set1_ps(v); }
HG_INLINE f32x16 load(const float* p) { return _mm512_loadu_ps(p); }
HG_INLINE void store(float* p, f32x16 v) { _mm512_storeu_ps(p, v); }
HG_INLINE f32x16 add(f32x16 a, f32x16 b) { return _mm512_add_ps(a, b); }
HG_INLINE f32x16 sub(f32x16 a, f32x16 b) { return _mm512_sub_ps(a, b); }
HG_INLINE f32x16 mul(f32x16 a, f32x16 b) { return _mm512_mul_ps(a, b); }
HG_INLINE f32x16 div(f32x16 a, f32x16 b) { return _mm512_div_ps(a, b); }
HG_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return _mm512_fmadd_ps(a, b, c); }
HG_INLINE f32x16 vmax(f32x16 a, f32x16 b) { return _mm512_max_ps(a, b); }
HG_INLINE f32x16 vmin(f32x16 a, f32x16 b) { return _mm512_min_ps(a, b); }
HG_INLINE f32x16 nearest(f32x16 a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

HG_INLINE mask16 first_lanes(int64_t n) { return n >= 16 ? 0xffff : mask16((1u << n) - 1); }
HG_INLINE mask16 greater_equal(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
HG_INLINE mask16 less(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
HG_INLINE mask16 is_nan(f32x16 a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
HG_INLINE mask16 both(mask16 a, mask16 b) { return a & b; }
HG_INLINE uint32_t lane_bits(mask16 m) { return m; }
HG_INLINE mask16 mask_from_bits(uint32_t bits) { return mask16(bits); }
HG_INLINE f32x16 select(mask16 m, f32x16 yes, f32x16 no) { return _mm512_mask_blend_ps(m, no, yes); }

HG_INLINE i32x16 iset1(uint32_t v) { return _mm512_set1_epi32(int(v)); }
HG_INLINE i32x16 iota() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
HG_INLINE i32x16 iadd(i32x16 a, i32x16 b) { return _mm512_add_epi32(a, b); }
HG_INLINE i32x16 imul(i32x16 a, i32x16 b) { return _mm512_mullo_epi32(a, b); }
HG_INLINE i32x16 ixor(i32x16 a, i32x16 b) { return _mm512_xor_si512(a, b); }
HG_INLINE i32x16 iand(i32x16 a, i32x16 b) { return _mm512_and_si512(a, b); }
HG_INLINE i32x16 ior(i32x16 a, i32x16 b) { return _mm512_or_si512(a, b); }
template <int N> HG_INLINE i32x16 shift_right(i32x16 a) { return _mm512_srli_epi32(a, N); }
template <int N> HG_INLINE i32x16 shift_left(i32x16 a) { return _mm512_slli_epi32(a, N); }
HG_INLINE f32x16 to_float(i32x16 a) { return _mm512_cvtepi32_ps(a); }
HG_INLINE i32x16 to_int(f32x16 a) { return _mm512_cvttps_epi32(a); }
HG_INLINE f32x16 as_float(i32x16 a) { return _mm512_castsi512_ps(a); }
HG_INLINE i32x16 as_int(f32x16 a) { return _mm512_castps_si512(a); }
HG_INLINE i32x16 iload(const void* p) { return _mm512_loadu_si512(p); }
HG_INLINE void istore(void* p, i32x16 v) { _mm512_storeu_si512(p, v); }

HG_INLINE f32x16 load_n(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
HG_INLINE void store_n(float* p, f32x16 v, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), v); }
HG_INLINE f32x16 widen(__m256i h) { return as_float(shift_left<16>(_mm512_cvtepu16_epi32(h))); }
HG_INLINE f32x16 load(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
HG_INLINE f32x16 load_n(const bf16* p, int64_t n) { return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }

HG_INLINE f32x16 load_halves(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
HG_INLINE i32x16 load_bytes(const void* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
HG_INLINE i32x16 load_words(const void* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }

// Halves are folded onto each other until one lane is left: the same tree on every instruction set.
HG_INLINE __m256 lower(f32x16 v) { return _mm512_castps512_ps256(v); }
HG_INLINE __m256 upper(f32x16 v) { return _mm512_extractf32x8_ps(v, 1); }

#if defined(__AVX512BF16__)
HG_INLINE __m256i narrow(f32x16 v) { return (__m256i)_mm512_cvtneps_pbh(v); }
#else
HG_INLINE __m256i narrow(f32x16 v) {
    i32x16 bits = as_int(v);
    i32x16 odd = iand(shift_right<16>(bits), iset1(1));
    i32x16 rounded = iadd(iadd(bits, iset1(0x7fff)), odd);
    i32x16 quiet = ior(bits, iset1(0x400000));
    return _mm512_cvtepi32_epi16(shift_right<16>(_mm512_mask_blend_epi32(is_nan(v), rounded, quiet)));
}
#endif
HG_INLINE void store(bf16* p, f32x16 v) { _mm256_storeu_si256((__m256i*)p, narrow(v)); }
HG_INLINE void store_n(bf16* p, f32x16 v, int64_t n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(v)); }

#else  // AVX2: the same sixteen lanes in two registers

struct f32x16 {
    __m256 lo, hi;
};
struct i32x16 {
    __m256i lo, hi;
};
struct mask16 {
    __m256 lo, hi;
};

HG_INLINE f32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
HG_INLINE f32x16 set1(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
HG_INLINE f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
HG_INLINE void store(float* p, f32x16 v) {
    _mm256_storeu_ps(p, v.lo);
    _mm256_storeu_ps(p + 8, v.hi);
}
#define HG_LANEWISE(name, intrinsic) \
    HG_INLINE f32x16 name(f32x16 a, f32x16 b) { return {intrinsic(a.lo, b.lo), intrinsic(a.hi, b.hi)}; }
HG_LANEWISE(add, _mm256_add_ps)
HG_LANEWISE(sub, _mm256_sub_ps)
HG_LANEWISE(mul, _mm256_mul_ps)
HG_LANEWISE(div, _mm256_div_ps)
HG_LANEWISE(vmax, _mm256_max_ps)
HG_LANEWISE(vmin, _mm256_min_ps)
#undef HG_LANEWISE
HG_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
HG_INLINE f32x16 nearest(f32x16 a) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}

HG_INLINE i32x16 iset1(uint32_t v) { return {_mm256_set1_epi32(int(v)), _mm256_set1_epi32(int(v))}; }
HG_INLINE i32x16 iota() {
    return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
#define HG_LANEWISE(name, intrinsic) \
    HG_INLINE i32x16 name(i32x16 a, i32x16 b) { return {intrinsic(a.lo, b.lo), intrinsic(a.hi, b.hi)}; }
HG_LANEWISE(iadd, _mm256_add_epi32)
HG_LANEWISE(imul, _mm256_mullo_epi32)
HG_LANEWISE(ixor, _mm256_xor_si256)
HG_LANEWISE(iand, _mm256_and_si256)
HG_LANEWISE(ior, _mm256_or_si256)
#undef HG_LANEWISE
template <int N> HG_INLINE i32x16 shift_right(i32x16 a) { return {_mm256_srli_epi32(a.lo, N), _mm256_srli_epi32(a.hi, N)}; }
template <int N> HG_INLINE i32x16 shift_left(i32x16 a) { return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)}; }
HG_INLINE f32x16 to_float(i32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
HG_INLINE i32x16 to_int(f32x16 a) { return {_mm256_cvttps_epi32(a.lo), _mm256_cvttps_epi32(a.hi)}; }
HG_INLINE f32x16 as_float(i32x16 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
HG_INLINE i32x16 as_int(f32x16 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
HG_INLINE i32x16 iload(const void* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
HG_INLINE void istore(void* p, i32x16 v) {
    _mm256_storeu_si256((__m256i*)p, v.lo);
    _mm256_storeu_si256((__m256i*)p + 1, v.hi);
}

HG_INLINE mask16 mask_from_ints(i32x16 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
HG_INLINE mask16 first_lanes(int64_t n) {
    __m256i limit = _mm256_set1_epi32(int(n));
    i32x16 lane = iota();
    return mask_from_ints({_mm256_cmpgt_epi32(limit, lane.lo), _mm256_cmpgt_epi32(limit, lane.hi)});
}
HG_INLINE mask16 mask_from_bits(uint32_t bits) {
    __m256i lo = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i hi = _mm256_slli_epi32(lo, 8);
    i32x16 chosen = iand(iset1(bits), {lo, hi});
    return mask_from_ints({_mm256_cmpeq_epi32(chosen.lo, lo), _mm256_cmpeq_epi32(chosen.hi, hi)});
}
HG_INLINE mask16 greater_equal(f32x16 a, f32x16 b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ)};
}
HG_INLINE mask16 less(f32x16 a, f32x16 b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
HG_INLINE mask16 is_nan(f32x16 a) {
    return {_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q)};
}
HG_INLINE mask16 both(mask16 a, mask16 b) { return {_mm256_and_ps(a.lo, b.lo), _mm256_and_ps(a.hi, b.hi)}; }
HG_INLINE uint32_t lane_bits(mask16 m) {
    return uint32_t(_mm256_movemask_ps(m.lo)) | uint32_t(_mm256_movemask_ps(m.hi)) << 8;
}
HG_INLINE f32x16 select(mask16 m, f32x16 yes, f32x16 no) {
    return {_mm256_blendv_ps(no.lo, yes.lo, m.lo), _mm256_blendv_ps(no.hi, yes.hi, m.hi)};
}

HG_INLINE __m256 lower(f32x16 v) { return v.lo; }
HG_INLINE __m256 upper(f32x16 v) { return v.hi; }

HG_INLINE f32x16 load_halves(const void* p) {
    const __m128i* half = (const __m128i*)p;
    return {_mm256_cvtph_ps(_mm_loadu_si128(half)), _mm256_cvtph_ps(_mm_loadu_si128(half + 1))};
}
HG_INLINE i32x16 load_bytes(const void* p) {
    const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
    return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
HG_INLINE i32x16 load_words(const void* p) {
    const __m128i* half = (const __m128i*)p;
    return {_mm256_cvtepu16_epi32(_mm_loadu_si128(half)), _mm256_cvtepu16_epi32(_mm_loadu_si128(half + 1))};
}

HG_INLINE f32x16 load(const bf16* p) {
    __m256i h = _mm256_loadu_si256((const __m256i*)p);
    return as_float(shift_left<16>(i32x16{_mm256_cvtepu16_epi32(_mm256_castsi256_si128(h)),
                                          _mm256_cvtepu16_epi32(_mm256_extracti128_si256(h, 1))}));
}
HG_INLINE __m256i narrow(f32x16 v) {
    i32x16 bits = as_int(v);
    i32x16 odd = iand(shift_right<16>(bits), iset1(1));
    i32x16 rounded = iadd(iadd(bits, iset1(0x7fff)), odd);
    i32x16 quiet = ior(bits, iset1(0x400000));
    i32x16 top = shift_right<16>(as_int(select(is_nan(v), as_float(quiet), as_float(rounded))));
    // packus works within 128-bit halves, hence the permutation.
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(top.lo, top.hi), 0xd8);
}
HG_INLINE void store(bf16* p, f32x16 v) { _mm256_storeu_si256((__m256i*)p, narrow(v)); }
template <class T> HG_INLINE f32x16 load_n(const T* p, int64_t n) {
    if (n >= 16) return load(p);
    T buffer[16] = {};
    memcpy(buffer, p, size_t(n) * sizeof(T));
    return load(buffer);
}
template <class T> HG_INLINE void store_n(T* p, f32x16 v, int64_t n) {
    if (n >= 16) return store(p, v);
    T buffer[16];
    store(buffer, v);
    memcpy(p, buffer, size_t(n) * sizeof(T));
}

#endif

HG_INLINE float reduce_add(f32x16 v) {
    __m256 eight = _mm256_add_ps(lower(v), upper(v));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

HG_INLINE float reduce_max(f32x16 v) {
    __m256 eight = _mm256_max_ps(lower(v), upper(v));
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

HG_INLINE float first_lane(f32x16 v) { return _mm_cvtss_f32(_mm256_castps256_ps128(lower(v))); }

// The value as it reads back after being stored as T.
template <class T> HG_INLINE f32x16 round_to(f32x16 v);
template <> inline f32x16 round_to<float>(f32x16 v) { return v; }
template <> inline f32x16 round_to<bf16>(f32x16 v) {
    bf16 buffer[16];
#if defined(__AVX512F__)
    (void)buffer;
    return widen(narrow(v));
#else
    store(buffer, v);
    return load(buffer);
#endif
}

// exp with about 1 ulp; exp(0) is exactly 1 (attention relies on it), arguments below -87 give exp(-87).
HG_INLINE f32x16 exp(f32x16 x) {
    x = vmin(vmax(x, set1(-87.0f)), set1(88.0f));
    f32x16 n = nearest(mul(x, set1(1.44269504f)));
    f32x16 r = fma(n, set1(-0.693359375f), x);
    r = fma(n, set1(2.12194440e-4f), r);
    f32x16 y = set1(1.9875691500e-4f);
    y = fma(y, r, set1(1.3981999507e-3f));
    y = fma(y, r, set1(8.3334519073e-3f));
    y = fma(y, r, set1(4.1665795894e-2f));
    y = fma(y, r, set1(1.6666665459e-1f));
    y = fma(y, r, set1(5.0000001201e-1f));
    y = fma(y, mul(r, r), add(r, set1(1.0f)));
    return mul(y, as_float(shift_left<23>(iadd(to_int(n), iset1(127)))));
}

// With an absolute error of about 1e-7.
HG_INLINE f32x16 tanh(f32x16 x) {
    return sub(set1(1.0f), div(set1(2.0f), add(exp(add(x, x)), set1(1.0f))));
}

// log(1 + r) + exponent * log(2), with 1 + r between sqrt(1/2) and sqrt(2).
HG_INLINE f32x16 log_reduced(f32x16 r, f32x16 exponent) {
    f32x16 square = mul(r, r);
    f32x16 y = set1(7.0376836292e-2f);
    y = fma(y, r, set1(-1.1514610310e-1f));
    y = fma(y, r, set1(1.1676998740e-1f));
    y = fma(y, r, set1(-1.2420140846e-1f));
    y = fma(y, r, set1(1.4249322787e-1f));
    y = fma(y, r, set1(-1.6668057665e-1f));
    y = fma(y, r, set1(2.0000714765e-1f));
    y = fma(y, r, set1(-2.4999993993e-1f));
    y = fma(y, r, set1(3.3333331174e-1f));
    y = mul(mul(y, r), square);
    y = fma(exponent, set1(-2.12194440e-4f), y);
    y = fma(square, set1(-0.5f), y);
    return fma(exponent, set1(0.693359375f), add(r, y));
}

// log of positive normal numbers.
HG_INLINE f32x16 log(f32x16 x) {
    i32x16 bits = as_int(x);
    f32x16 exponent = to_float(iadd(shift_right<23>(bits), iset1(uint32_t(-126))));
    f32x16 mantissa = as_float(ior(iand(bits, iset1(0x007fffff)), iset1(0x3f000000)));  // in [0.5, 1)
    mask16 small = less(mantissa, set1(0.707106781f));
    exponent = select(small, sub(exponent, set1(1.0f)), exponent);
    f32x16 r = sub(select(small, add(mantissa, mantissa), mantissa), set1(1.0f));
    return log_reduced(r, exponent);
}

// Into L2. Prefetched data is often larger than L1 and would evict what is being read: measured on Zen 4, prefetching
// into L1 instead costs a third of the bandwidth of decode attention and of products of 8 rows.
HG_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }
HG_INLINE void prefetch_to_l1(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

}  // namespace HEADGATE_ISA
}  // namespace headgate
