// Weights in GGUF blocks, packed without a change of any number, and their products.
//
// A file stores a row as blocks: small whole numbers ("codes") with a scale, and for some kinds a minimum, per group of
// 16 or 32 columns. Here 16 rows are packed together. First come the codes, by pair of columns, then the numbers from
// which scales and minima follow. An element of a product is
//
//     sum over groups of  scale * (chain of additions of x * code over the group, from zero)  +  minimum * (sum of x)
//
// in this order. Codes are exact in bfloat16, and scales and minima in float32, so no weight is rounded. The order does
// not depend on how many rows or columns are computed beside an element, nor on how columns are divided into chunks.
#pragma once

#include "gemm.h"

namespace headgate {
namespace HEADGATE_ISA {

// Bits of a code beyond the fourth (or second) are packed apart from the others, so that both fill whole bytes.
struct BlockKind {
    int64_t columns, bytes;  // of a block of one row, as in the file
    int low, high;           // bits of a code: lower and upper ones
    int64_t group;           // columns per scale
    int factors;             // bytes per group and row from which its scale follows, beside the scale of the block
    bool minima;
    float offset;            // what a code of zero means
};

HG_INLINE BlockKind kind_of(Stored stored) {
    switch (stored) {
        case Stored::q4_0: return {32, 18, 4, 0, 32, 0, false, -8.0f};
        case Stored::q4_1: return {32, 20, 4, 0, 32, 0, true, 0.0f};
        case Stored::q5_0: return {32, 22, 4, 1, 32, 0, false, -16.0f};
        case Stored::q5_1: return {32, 24, 4, 1, 32, 0, true, 0.0f};
        case Stored::q8_0: return {32, 34, 8, 0, 32, 0, false, 0.0f};
        case Stored::q2_k: return {256, 84, 2, 0, 16, 1, true, 0.0f};
        case Stored::q3_k: return {256, 110, 2, 1, 16, 1, false, -4.0f};
        case Stored::q4_k: return {256, 144, 4, 0, 32, 2, true, 0.0f};
        case Stored::q5_k: return {256, 176, 4, 1, 32, 2, true, 0.0f};
        default: return {256, 210, 4, 2, 16, 1, false, -32.0f};  // q6_k
    }
}

// Where the parts of 16 packed rows begin, in bytes: lower bits, upper bits, factors of groups, scales and minima of
// blocks as half-precision numbers, the end.
struct BlockLayout {
    int64_t low, high, factors, scales, minima, end;
};

HG_INLINE BlockLayout layout_of(const BlockKind& kind, int64_t K) {
    const int64_t high = 2 * K * kind.low, factors = high + 2 * K * kind.high;
    const int64_t scales = factors + K / kind.group * kind.factors * kLanes;
    const int64_t minima = scales + K / kind.columns * kLanes * 2;
    const int64_t end = minima + (kind.minima ? K / kind.columns * kLanes * 2 : 0);
    return {0, high, factors, scales, minima, ceil_div(end, 64) * 64};
}

HG_INLINE int64_t packed_block_bytes(Stored stored, int64_t K) { return layout_of(kind_of(stored), K).end; }

// ---- packing -------------------------------------------------------------------------------------------------------

// One block of one row, as numbers that no longer share bytes.
struct Block {
    uint8_t codes[256];
    uint8_t factors[32];  // of each group: for its scale, then for its minimum
    uint16_t scale, minimum;
};

HG_INLINE uint16_t half_at(const uint8_t* p) { return uint16_t(p[0] | p[1] << 8); }

// Codes of 32 columns: lower halves of bytes, then upper ones, and a fifth bit from `fifth`.
HG_INLINE void read_halves(Block& block, const uint8_t* bytes, uint32_t fifth) {
    for (int i = 0; i < 16; ++i) {
        block.codes[i] = uint8_t((bytes[i] & 15) | (fifth >> i & 1) << 4);
        block.codes[i + 16] = uint8_t(bytes[i] >> 4 | (fifth >> (i + 16) & 1) << 4);
    }
}

HG_INLINE uint32_t word_at(const uint8_t* p) {
    uint32_t word;
    memcpy(&word, p, 4);
    return word;
}

HG_INLINE void read_2_bits(Block& block, const uint8_t* bytes) {
    for (int c = 0; c < 256; ++c) block.codes[c] = bytes[c / 128 * 32 + c % 32] >> (c % 128 / 32 * 2) & 3;
}

// Lower halves of 32 bytes, then upper ones; the fifth bits of group g are bit g of `fifth`.
HG_INLINE void read_4_bits(Block& block, const uint8_t* bytes, const uint8_t* fifth) {
    for (int c = 0; c < 256; ++c) {
        const int half = bytes[c / 64 * 32 + c % 32] >> (c % 64 / 32 * 4) & 15;
        block.codes[c] = uint8_t(half | (fifth ? fifth[c % 32] >> (c / 32) & 1 : 0) << 4);
    }
}

// The factors of eight groups, six bits each, in 12 bytes.
HG_INLINE void read_factors(Block& block, const uint8_t* packed) {
    for (int g = 0; g < 8; ++g) {
        const uint8_t first = packed[g % 4], second = packed[g % 4 + 4], third = packed[g % 4 + 8];
        block.factors[2 * g] = uint8_t(g < 4 ? first & 63 : (third & 15) | first >> 6 << 4);
        block.factors[2 * g + 1] = uint8_t(g < 4 ? second & 63 : third >> 4 | second >> 6 << 4);
    }
}

HG_INLINE void read_q3_k(Block& block, const uint8_t* p) {
    read_2_bits(block, p + 32);
    for (int c = 0; c < 256; ++c) block.codes[c] = uint8_t(block.codes[c] | (p[c % 32] >> (c / 32) & 1) << 2);
    const uint8_t* packed = p + 96;
    for (int g = 0; g < 16; ++g)
        block.factors[g] = uint8_t((packed[g % 8] >> (g / 8 * 4) & 15) | (packed[8 + g % 4] >> (g / 4 * 2) & 3) << 4);
    block.scale = half_at(p + 108);
}

HG_INLINE void read_q6_k(Block& block, const uint8_t* p) {
    for (int c = 0; c < 256; ++c) {
        const int quarter = c % 128 / 32, column = c % 32;
        const uint8_t low = p[c / 128 * 64 + quarter % 2 * 32 + column] >> (quarter / 2 * 4) & 15;
        block.codes[c] = uint8_t(low | (p[128 + c / 128 * 32 + column] >> (quarter * 2) & 3) << 4);
    }
    memcpy(block.factors, p + 192, 16);
    block.scale = half_at(p + 208);
}

HG_INLINE Block read_block(Stored stored, const uint8_t* p) {
    Block block = {};
    switch (stored) {
        case Stored::q4_0: block.scale = half_at(p), read_halves(block, p + 2, 0); break;
        case Stored::q4_1: block.scale = half_at(p), block.minimum = half_at(p + 2), read_halves(block, p + 4, 0); break;
        case Stored::q5_0: block.scale = half_at(p), read_halves(block, p + 6, word_at(p + 2)); break;
        case Stored::q5_1:
            block.scale = half_at(p), block.minimum = half_at(p + 2), read_halves(block, p + 8, word_at(p + 4));
            break;
        case Stored::q8_0: block.scale = half_at(p), memcpy(block.codes, p + 2, 32); break;
        case Stored::q2_k:
            memcpy(block.factors, p, 16), read_2_bits(block, p + 16);
            block.scale = half_at(p + 80), block.minimum = half_at(p + 82);
            break;
        case Stored::q3_k: read_q3_k(block, p); break;
        case Stored::q4_k:
            block.scale = half_at(p), block.minimum = half_at(p + 2);
            read_factors(block, p + 4), read_4_bits(block, p + 16, nullptr);
            break;
        case Stored::q5_k:
            block.scale = half_at(p), block.minimum = half_at(p + 2);
            read_factors(block, p + 4), read_4_bits(block, p + 48, p + 16);
            break;
        default: read_q6_k(block, p);
    }
    return block;
}

// Some bits of the codes of one row. For every pair of columns there are as many bits in each of two words of 16 bits
// per row, one for each column; the words of 16 rows lie side by side.
HG_INLINE void write_bits(uint8_t* out, int64_t lane, const uint8_t* codes, int64_t columns, int shift, int bits) {
    const int64_t pairs = 16 / bits;  // per word
    for (int64_t first = 0; first < columns; first += 2 * pairs)
        for (int64_t odd = 0; odd < 2; ++odd) {
            uint32_t word = 0;
            for (int64_t p = 0; p < pairs; ++p)
                word |= uint32_t(codes[first + 2 * p + odd] >> shift & ((1 << bits) - 1)) << (p * bits);
            const uint16_t kept = uint16_t(word);
            memcpy(out + first / (2 * pairs) * 64 + lane * 4 + odd * 2, &kept, 2);
        }
}

HG_INLINE void write_block(uint8_t* rows, const BlockKind& kind, const BlockLayout& at, int64_t index, int64_t lane,
                           const Block& block) {
    const int64_t first = index * kind.columns, groups = kind.columns / kind.group;
    uint8_t* low = rows + at.low + 2 * first * kind.low;
    if (kind.low == 8) {
        for (int64_t c = 0; c < kind.columns; ++c) low[c / 2 * 32 + lane * 2 + c % 2] = block.codes[c];
    } else {
        write_bits(low, lane, block.codes, kind.columns, 0, kind.low);
    }
    if (kind.high)
        write_bits(rows + at.high + 2 * first * kind.high, lane, block.codes, kind.columns, kind.low, kind.high);
    for (int64_t i = 0; i < groups * kind.factors; ++i)
        rows[at.factors + (index * groups * kind.factors + i) * kLanes + lane] = block.factors[i];
    memcpy(rows + at.scales + (index * kLanes + lane) * 2, &block.scale, 2);
    if (kind.minima) memcpy(rows + at.minima + (index * kLanes + lane) * 2, &block.minimum, 2);
}

// Where 16 packed rows begin that contain `row`.
HG_INLINE uint8_t* packed_rows(const PackArgs& args, int64_t row) {
    const int64_t block = row / kLanes * args.block_stride + args.block_offset;
    return static_cast<uint8_t*>(args.packed) + block * packed_block_bytes(args.stored, args.K);
}

HG_INLINE void pack_block_rows(const Runtime& runtime, const PackArgs& args) {
    const BlockKind kind = kind_of(args.stored);
    const BlockLayout at = layout_of(kind, args.K);
    for_each_run_if_worth(runtime, args.count, args.count * args.K, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            const int64_t row = args.first_row + i;
            const uint8_t* in = static_cast<const uint8_t*>(args.rows) + i * args.row_stride;
            for (int64_t b = 0; b < args.K / kind.columns; ++b)
                write_block(packed_rows(args, row), kind, at, b, row % kLanes, read_block(args.stored, in + b * kind.bytes));
        }
    });
}

// ---- unpacking -----------------------------------------------------------------------------------------------------

// The scales and minima of 16 rows for `groups` groups from `first` on; each as [groups][16]. kFactors is how they follow
// from the bytes of a group: not at all, as two numbers of four bits, as an unsigned number with an offset, as a signed
// number, as two numbers.
enum class Factors { none, halves, offset, is_signed, two };

template <Factors kFactors, bool kMinima>
HG_INLINE void unpack_scales_of(const uint8_t* rows, const BlockKind& kind, const BlockLayout& at, int64_t first,
                                int64_t groups, int64_t ahead, float* scales, float* minima) {
    const int64_t per_block = kind.columns / kind.group;
    const uint8_t* factors = rows + at.factors + first * kind.factors * kLanes;
    for (int64_t i = 0; i < groups; ++i, factors += kind.factors * kLanes) {
        const int64_t block = kFactors == Factors::none ? first + i : (first + i) / per_block;
        prefetch(rows + at.scales + block * kLanes * 2 + ahead);
        if constexpr (kMinima) prefetch(rows + at.minima + block * kLanes * 2 + ahead);
        if constexpr (kFactors != Factors::none) prefetch(factors + ahead);
        f32x16 scale = load_halves(rows + at.scales + block * kLanes * 2), minimum = zero();
        if constexpr (kMinima) minimum = load_halves(rows + at.minima + block * kLanes * 2);
        if constexpr (kFactors == Factors::halves) {
            scale = mul(scale, to_float(iand(load_bytes(factors), iset1(15))));
            minimum = mul(sub(zero(), minimum), to_float(shift_right<4>(load_bytes(factors))));
        } else if constexpr (kFactors == Factors::offset) {
            scale = mul(scale, sub(to_float(load_bytes(factors)), set1(32.0f)));
        } else if constexpr (kFactors == Factors::is_signed) {
            scale = mul(scale, sub(to_float(ixor(load_bytes(factors), iset1(128))), set1(128.0f)));
        } else if constexpr (kFactors == Factors::two) {
            scale = mul(scale, to_float(load_bytes(factors)));
            minimum = mul(sub(zero(), minimum), to_float(load_bytes(factors + kLanes)));
        }
        store(scales + i * kLanes, scale);
        if constexpr (kMinima) store(minima + i * kLanes, minimum);
    }
}

HG_INLINE void unpack_scales(Stored stored, const uint8_t* rows, const BlockKind& kind, const BlockLayout& at,
                             int64_t first, int64_t groups, int64_t ahead, float* scales, float* minima) {
    if (stored == Stored::q2_k)
        return unpack_scales_of<Factors::halves, true>(rows, kind, at, first, groups, ahead, scales, minima);
    if (stored == Stored::q3_k)
        return unpack_scales_of<Factors::offset, false>(rows, kind, at, first, groups, ahead, scales, minima);
    if (stored == Stored::q6_k)
        return unpack_scales_of<Factors::is_signed, false>(rows, kind, at, first, groups, ahead, scales, minima);
    if (kind.factors) return unpack_scales_of<Factors::two, true>(rows, kind, at, first, groups, ahead, scales, minima);
    if (kind.minima) return unpack_scales_of<Factors::none, true>(rows, kind, at, first, groups, ahead, scales, minima);
    unpack_scales_of<Factors::none, false>(rows, kind, at, first, groups, ahead, scales, minima);
}

// Two columns of 16 rows as the right operand of a product.
HG_INLINE void store_pair(float* out, f32x16 first, f32x16 second) {
    store(out, first);
    store(out + kLanes, second);
}
HG_INLINE void store_pair(bf16* out, f32x16 first, f32x16 second) {  // exact for codes
    istore(out, ior(shift_right<16>(as_int(first)), as_int(second)));
}

template <int N> HG_INLINE i32x16 shifted_left(i32x16 a) {
    if constexpr (N >= 0) return shift_left<N>(a);
    else return shift_right<-N>(a);
}

// Codes by arithmetic, on any machine.
template <class T, int kLow, int kHigh> struct Codes {
    f32x16 offset;
    explicit Codes(float zero_code) : offset(set1(zero_code)) {}

    // Pair kPair of those in `low`; its upper bits begin at bit kBit of both words of `high`.
    template <int kPair, int kBit> HG_INLINE void unpack(T* out, i32x16 low, i32x16 high, const Codes& self) {
        const i32x16 mask = iset1((1 << kLow) - 1);
        i32x16 first = iand(shift_right<kPair * kLow>(low), mask);
        i32x16 second = iand(shift_right<16 + kPair * kLow>(low), mask);
        if constexpr (kHigh > 0) {
            const i32x16 upper = iset1((1 << kHigh) - 1);
            first = ior(first, shift_left<kLow>(iand(shift_right<kBit>(high), upper)));
            second = ior(second, shift_left<kLow>(iand(shift_right<16 + kBit>(high), upper)));
        }
        store_pair(out, add(to_float(first), self.offset), add(to_float(second), self.offset));
    }
};

#if defined(__AVX512BW__)
// Codes in bfloat16 by looking up both words of all rows at once. Words are shifted as pairs, so bits above a code are
// those of others: a table repeats its entries for them.
template <int kLow, int kHigh> struct Codes<bf16, kLow, kHigh> {
    static constexpr int kBits = kLow + kHigh;
    __m512i table, rest;
    explicit Codes(float zero_code) {
        alignas(64) float numbers[64];
        for (int i = 0; i < 64; ++i) numbers[i] = float(i & ((1 << kBits) - 1)) + zero_code;
        alignas(64) bf16 entries[64];
        for (int i = 0; i < 64; i += 16) store(entries + i, load(numbers + i));
        table = iload(entries), rest = iload(entries + 32);
    }

    template <int kPair, int kBit> HG_INLINE __m512i pair(i32x16 low, i32x16 high, const Codes& self) {
        __m512i code = _mm512_srli_epi32(low, kPair * kLow);
        if constexpr (kHigh > 0) {  // lower bits from `code`, all others from `high`
            const __m512i lower = _mm512_set1_epi16((1 << kLow) - 1);
            code = _mm512_ternarylogic_epi32(lower, code, shifted_left<kLow - kBit>(high), 0xca);
        }
        if constexpr (kBits > 5) return _mm512_permutex2var_epi16(self.table, code, self.rest);
        else return _mm512_permutexvar_epi16(code, self.table);
    }

    template <int kPair, int kBit> HG_INLINE void unpack(bf16* out, i32x16 low, i32x16 high, const Codes& self) {
        istore(out, pair<kPair, kBit>(low, high, self));
    }
};
#endif

// Pairs kPair and on of one register of lower bits. Upper bits begin at pair kFirst of their register.
template <class T, int kLow, int kHigh, int kFirst, int kPair = 0>
HG_INLINE void unpack_register(T* out, i32x16 low, i32x16 high, const Codes<T, kLow, kHigh>& codes) {
    if constexpr (kPair < 16 / kLow) {
        Codes<T, kLow, kHigh>::template unpack<kPair, (kFirst + kPair) * kHigh>(out + kPair * 2 * kLanes, low, high, codes);
        unpack_register<T, kLow, kHigh, kFirst, kPair + 1>(out, low, high, codes);
    }
}

// A register of upper bits and all registers of lower bits that belong to it.
template <class T, int kLow, int kHigh, int kRegister = 0>
HG_INLINE void unpack_registers(T* out, const uint8_t* low, i32x16 high, const Codes<T, kLow, kHigh>& codes) {
    if constexpr (kRegister < kLow / kHigh) {
        constexpr int kPairs = 16 / kLow;
        unpack_register<T, kLow, kHigh, kRegister * kPairs>(out + kRegister * kPairs * 2 * kLanes,
                                                            iload(low + kRegister * 64), high, codes);
        unpack_registers<T, kLow, kHigh, kRegister + 1>(out, low, high, codes);
    }
}

// The codes of 16 rows and `columns` columns as a right operand. `ahead` bytes further is what will be read next.
template <class T, int kLow, int kHigh>
void unpack_codes(T* out, const uint8_t* low, const uint8_t* high, int64_t columns, float offset, int64_t ahead) {
    const Codes<T, kLow, kHigh> codes(offset);
    if constexpr (kHigh == 0) {
        constexpr int64_t kColumns = 32 / kLow;
        for (int64_t c = 0; c < columns; c += kColumns, low += 64, out += kColumns * kLanes) {
            prefetch(low + ahead);
            unpack_register<T, kLow, 0, 0>(out, iload(low), i32x16{}, codes);
        }
    } else {
        constexpr int64_t kColumns = 32 / kHigh;
        for (int64_t c = 0; c < columns; c += kColumns, high += 64, low += 64 * kLow / kHigh, out += kColumns * kLanes) {
            prefetch(high + ahead);
            HG_UNROLL for (int i = 0; i < kLow / kHigh; ++i) prefetch(low + 64 * i + ahead);
            unpack_registers<T, kLow, kHigh>(out, low, iload(high), codes);
        }
    }
}

// Codes of eight bits, which are signed numbers: a byte per column, both columns of a pair side by side.
#if defined(__AVX512BF16__)
HG_INLINE __m512i pair_of_bytes(const uint8_t* pair) {
    const __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)pair)));
    const __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(pair + 16))));
    return (__m512i)_mm512_cvtne2ps_pbh(second, first);
}
HG_INLINE void store_bytes(bf16* out, const uint8_t* pair) { istore(out, pair_of_bytes(pair)); }
#else
HG_INLINE void store_bytes(bf16* out, const uint8_t* pair) {
    const i32x16 words = ixor(load_words(pair), iset1(0x8080));
    store_pair(out, sub(to_float(iand(words, iset1(255))), set1(128.0f)),
               sub(to_float(shift_right<8>(words)), set1(128.0f)));
}
#endif
HG_INLINE void store_bytes(float* out, const uint8_t* pair) {
    const i32x16 words = ixor(load_words(pair), iset1(0x8080));
    store_pair(out, sub(to_float(iand(words, iset1(255))), set1(128.0f)),
               sub(to_float(shift_right<8>(words)), set1(128.0f)));
}

template <class T> void unpack_bytes(T* out, const uint8_t* low, int64_t columns, int64_t ahead) {
    for (int64_t c = 0; c < columns; c += 4, low += 64, out += 4 * kLanes) {
        prefetch(low + ahead);
        store_bytes(out, low);
        store_bytes(out + 2 * kLanes, low + 32);
    }
}

// The codes of 16 rows in columns first .. first + columns.
template <class T>
HG_INLINE void unpack_columns(T* out, const uint8_t* rows, const BlockKind& kind, const BlockLayout& at, int64_t first,
                              int64_t columns, int64_t ahead) {
    const uint8_t *low = rows + at.low + 2 * first * kind.low, *high = rows + at.high + 2 * first * kind.high;
    if (kind.low == 8) return unpack_bytes(out, low, columns, ahead);
    if (kind.low == 2 && !kind.high) return unpack_codes<T, 2, 0>(out, low, high, columns, kind.offset, ahead);
    if (kind.low == 2) return unpack_codes<T, 2, 1>(out, low, high, columns, kind.offset, ahead);
    if (kind.high == 0) return unpack_codes<T, 4, 0>(out, low, high, columns, kind.offset, ahead);
    if (kind.high == 1) return unpack_codes<T, 4, 1>(out, low, high, columns, kind.offset, ahead);
    return unpack_codes<T, 4, 2>(out, low, high, columns, kind.offset, ahead);
}

constexpr int64_t kChunk = 256;      // most columns that are unpacked at a time: a multiple of those of any block
constexpr int64_t kLeastGroup = 16;  // columns of the smallest group

// Columns are divided evenly into as few chunks as possible: 576 are 3 x 192, not 256 + 256 + 64.
HG_INLINE int64_t chunk_of(const BlockKind& kind, int64_t K) {
    return ceil_div(ceil_div(K, ceil_div(K, kChunk)), kind.columns) * kind.columns;
}

// Rows by id. A number is `scale * code`, plus the minimum: two roundings in float32, as in the reference.
template <class T> void unpack_block_rows(const Runtime& runtime, const PackArgs& args) {
    const BlockKind kind = kind_of(args.stored);
    const BlockLayout at = layout_of(kind, args.K);
    for_each_run_if_worth(runtime, args.count, args.count * args.K * kLanes, [&](int64_t begin, int64_t end) {
        alignas(64) float codes[kChunk * kLanes], scales[kChunk], minima[kChunk];
        for (int64_t i = begin; i < end; ++i) {
            const uint8_t* rows = packed_rows(args, args.ids[i]);
            const int64_t lane = args.ids[i] % kLanes;
            T* out = static_cast<T*>(args.rows) + i * args.row_stride;
            for (int64_t first = 0; first < args.K; first += kChunk) {
                const int64_t columns = min64(kChunk, args.K - first);
                unpack_columns(codes, rows, kind, at, first, columns, 0);
                unpack_scales(args.stored, rows, kind, at, first / kind.group, columns / kind.group, 0, scales, minima);
                for (int64_t c = 0; c < columns; c += kLanes) {
                    alignas(64) float numbers[kLanes];
                    const int64_t group = c / kind.group * kLanes + lane;
                    for (int64_t k = 0; k < kLanes; ++k) numbers[k] = codes[(c + k) * kLanes + lane];
                    f32x16 number = mul(set1(scales[group]), load(numbers));
                    if (kind.minima) number = add(number, set1(minima[group]));
                    store(out + first + c, number);
                }
            }
        }
    });
}

// ---- products ------------------------------------------------------------------------------------------------------

// sums[NV][MR][16] += left[MR rows] x right, for `groups` groups of `steps` steps.
template <class T> struct BlockTileCall {
    float* sums;
    const typename Product<T>::Left* left;
    const float* left_sums;  // [groups][MR], or null if there are no minima
    const T* const* right;   // codes of the NV blocks of rows
    const float* const* scales;
    const float* const* minima;
    int64_t groups, steps;
};

// Adds the chains of group `g` to the sums.
template <bool kMinima, int MR, int NV, class Call>
HG_INLINE void add_group(const Call& call, const f32x16 (&dot)[MR][NV], int64_t g) {
    float* const sums = call.sums;  // read once, because stores might change `call` as far as the compiler can tell
    const float* const left_sums = kMinima ? call.left_sums + g * MR : nullptr;
    HG_UNROLL for (int j = 0; j < NV; ++j) {
        const f32x16 scale = load(call.scales[j] + g * kLanes);
        const f32x16 minimum = kMinima ? load(call.minima[j] + g * kLanes) : zero();
        HG_UNROLL for (int r = 0; r < MR; ++r) {
            float* sum = sums + (j * MR + r) * kLanes;
            f32x16 total = fma(scale, dot[r][j], load(sum));
            if (kMinima) total = fma(minimum, set1(left_sums[r]), total);
            store(sum, total);
        }
    }
}

template <class T, int MR, int NV> void block_tile(const BlockTileCall<T>& call) {
    using P = Product<T>;
    const auto* x = call.left;
    const T* w[NV];
    HG_UNROLL for (int j = 0; j < NV; ++j) w[j] = call.right[j];
    for (int64_t g = 0; g < call.groups; ++g) {
        f32x16 dot[MR][NV];
        HG_UNROLL for (int j = 0; j < NV; ++j)
            HG_UNROLL for (int r = 0; r < MR; ++r) dot[r][j] = zero();
        for (int64_t k = 0; k < call.steps; ++k) {
            P::template step<MR, NV, 1, MR>(dot, x, w);
            HG_UNROLL for (int j = 0; j < NV; ++j) w[j] += P::kDepth * kLanes;
            x += P::kEntries * MR;
        }
        if (call.left_sums) add_group<true>(call, dot, g);
        else add_group<false>(call, dot, g);
    }
}

template <class T, int NV, int MR> struct BlockTileFor {
    static constexpr bool kFits = MR * NV <= kMaxWide || NV == 1;
    static constexpr void (*function)(const BlockTileCall<T>&) = block_tile<T, MR, kFits ? NV : 1>;
};

template <class T, int NV> HG_INLINE void run_block_tile(int64_t rows, const BlockTileCall<T>& call) {
    static constexpr void (*functions[])(const BlockTileCall<T>&) = {
        nullptr,
        BlockTileFor<T, NV, 1>::function, BlockTileFor<T, NV, 2>::function, BlockTileFor<T, NV, 3>::function,
        BlockTileFor<T, NV, 4>::function, BlockTileFor<T, NV, 5>::function, BlockTileFor<T, NV, 6>::function,
#if defined(__AVX512F__)
        BlockTileFor<T, NV, 7>::function, BlockTileFor<T, NV, 8>::function, BlockTileFor<T, NV, 9>::function,
        BlockTileFor<T, NV, 10>::function, BlockTileFor<T, NV, 11>::function, BlockTileFor<T, NV, 12>::function,
#endif
    };
    functions[rows](call);
}

template <class T> HG_INLINE void run_block_tile(int64_t rows, int64_t wide, const BlockTileCall<T>& call) {
    if (wide == 4) return run_block_tile<T, 4>(rows, call);
    if (wide == 2) return run_block_tile<T, 2>(rows, call);
    return run_block_tile<T, 1>(rows, call);
}

#if defined(__AVX512BF16__)
// The same for a few rows, whose products use codes only once: straight from registers, with the same bits.
template <int MR, int NV> struct FewRowsCall {
    float* sums;
    const uint32_t* left;
    const float* left_sums;
    const uint8_t *low[NV], *high[NV];
    const float *scales[NV], *minima[NV];
    int64_t groups;
};

HG_INLINE void add_pair(__m512& dot, uint32_t left, __m512i right) {
    dot = _mm512_dpbf16_ps(dot, (__m512bh)iset1(left), (__m512bh)right);
}

// Pairs kPair and on of those that one register of lower bits per block has.
template <int kLow, int kHigh, int kFirst, int MR, int NV, int kPair = 0>
HG_INLINE void add_register(__m512 (&dot)[MR][NV], const uint32_t* x, const __m512i (&low)[NV], const __m512i (&high)[NV],
                            const Codes<bf16, kLow, kHigh>& codes) {
    using C = Codes<bf16, kLow, kHigh>;
    if constexpr (kPair < 16 / kLow) {
        HG_UNROLL for (int j = 0; j < NV; ++j) {
            const __m512i right = C::template pair<kPair, (kFirst + kPair) * kHigh>(low[j], high[j], codes);
            HG_UNROLL for (int r = 0; r < MR; ++r) add_pair(dot[r][j], x[kPair * MR + r], right);
        }
        add_register<kLow, kHigh, kFirst, MR, NV, kPair + 1>(dot, x, low, high, codes);
    }
}

// Registers kRegister and on of the kRegisters of one group.
template <int kLow, int kHigh, int kRegisters, int MR, int NV, int kRegister = 0>
HG_INLINE void add_registers(__m512 (&dot)[MR][NV], const uint32_t* x, const uint8_t* const (&low)[NV], int64_t ahead,
                             const __m512i (&high)[NV], const Codes<bf16, kLow, kHigh>& codes) {
    if constexpr (kRegister < kRegisters) {
        constexpr int kPairs = 16 / kLow;
        __m512i here[NV];
        HG_UNROLL for (int j = 0; j < NV; ++j) here[j] = iload(low[j] + kRegister * 64), prefetch(low[j] + kRegister * 64 + ahead);
        add_register<kLow, kHigh, kRegister * kPairs, MR, NV>(dot, x + kRegister * kPairs * MR, here, high, codes);
        add_registers<kLow, kHigh, kRegisters, MR, NV, kRegister + 1>(dot, x, low, ahead, high, codes);
    }
}

// kGroup columns per scale. A register of upper bits has those of exactly one group.
template <int kLow, int kHigh, int kGroup, int MR, int NV>
void few_rows(const FewRowsCall<MR, NV>& call, float offset, int64_t ahead) {
    constexpr int kRegisters = kGroup * kLow / 32;
    const Codes<bf16, kLow, kHigh> codes(offset);
    const uint8_t *low[NV], *high[NV];
    HG_UNROLL for (int j = 0; j < NV; ++j) low[j] = call.low[j], high[j] = call.high[j];
    const uint32_t* x = call.left;
    for (int64_t g = 0; g < call.groups; ++g, x += kGroup / 2 * MR) {
        __m512 dot[MR][NV];
        __m512i upper[NV];
        HG_UNROLL for (int j = 0; j < NV; ++j) {
            upper[j] = kHigh ? iload(high[j]) : __m512i{};
            HG_UNROLL for (int r = 0; r < MR; ++r) dot[r][j] = zero();
        }
        add_registers<kLow, kHigh, kRegisters, MR, NV>(dot, x, low, ahead, upper, codes);
        HG_UNROLL for (int j = 0; j < NV; ++j) low[j] += 64 * kRegisters, high[j] += 64;
        if (call.left_sums) add_group<true>(call, dot, g);
        else add_group<false>(call, dot, g);
    }
}

// The same for codes of eight bits.
template <int MR, int NV> void few_rows_of_bytes(const FewRowsCall<MR, NV>& call, int64_t ahead) {
    const uint8_t* low[NV];
    HG_UNROLL for (int j = 0; j < NV; ++j) low[j] = call.low[j];
    const uint32_t* x = call.left;
    for (int64_t g = 0; g < call.groups; ++g) {
        __m512 dot[MR][NV];
        HG_UNROLL for (int j = 0; j < NV; ++j)
            HG_UNROLL for (int r = 0; r < MR; ++r) dot[r][j] = zero();
        for (int64_t pair = 0; pair < 16; ++pair, x += MR)
            HG_UNROLL for (int j = 0; j < NV; ++j) {
                const __m512i right = pair_of_bytes(low[j]);
                if (pair % 2 == 0) prefetch(low[j] + ahead);
                low[j] += 32;
                HG_UNROLL for (int r = 0; r < MR; ++r) add_pair(dot[r][j], x[r], right);
            }
        add_group<false>(call, dot, g);
    }
}

template <int MR, int NV>
HG_INLINE void run_few_rows(const BlockKind& kind, const FewRowsCall<MR, NV>& call, int64_t ahead) {
    if (kind.low == 8) few_rows_of_bytes(call, ahead);
    else if (kind.low == 2) few_rows<2, 0, 16>(call, kind.offset, ahead);
    else if (kind.high == 0) few_rows<4, 0, 32>(call, kind.offset, ahead);
    else if (kind.high == 1) few_rows<4, 1, 32>(call, kind.offset, ahead);
    else few_rows<4, 2, 16>(call, kind.offset, ahead);
}
#endif

// The sums of x over the groups of columns, behind the left operand: [groups][rows] for each tile of rows.
HG_INLINE float* left_sums(const LinearArgs& args) {
    return reinterpret_cast<float*>(static_cast<char*>(args.scratch) + left_bytes(args.M, args.K));
}

template <class T> void sum_left_tile(const LinearArgs& args, int64_t row, int64_t rows) {
    const BlockKind kind = kind_of(args.stored);
    const int64_t groups = args.K / kind.group;
    float* out = left_sums(args) + row * groups;
    for (int64_t r = 0; r < rows; ++r) {
        const T* x = left_row<T>(args, row + r);
        for (int64_t g = 0; g < groups; ++g, x += kind.group) {
            f32x16 sum = load(x);
            if (kind.group > kLanes) sum = add(sum, load(x + kLanes));
            out[g * rows + r] = reduce_add(sum);
        }
    }
}

constexpr int64_t kPanelTiles = 16;  // tiles of rows that use codes once they are unpacked

#if defined(__AVX512BF16__)
// NV blocks for MR rows, which are all.
template <int MR, int NV>
void linear_few_rows(const LinearArgs& args, const BlockKind& kind, const BlockLayout& at, int64_t block, int64_t wide) {
    alignas(64) float scales[NV][kChunk / kLeastGroup * kLanes], minima[NV][kChunk / kLeastGroup * kLanes];
    alignas(64) float sums[MR * NV * kLanes] = {};
    const uint8_t* rows = static_cast<const uint8_t*>(args.weight) + block * at.end;
    const int64_t chunk = chunk_of(kind, args.K);
    for (int64_t k = 0; k < args.K; k += chunk) {
        const int64_t group = k / kind.group, groups = min64(chunk, args.K - k) / kind.group;
        FewRowsCall<MR, NV> call{sums, static_cast<const uint32_t*>(args.scratch) + k / 2 * MR,
                                 kind.minima ? left_sums(args) + group * MR : nullptr};
        for (int64_t j = 0; j < NV; ++j) {
            unpack_scales(args.stored, rows + j * at.end, kind, at, group, groups, wide * at.end, scales[j], minima[j]);
            call.low[j] = rows + j * at.end + at.low + 2 * k * kind.low;
            call.high[j] = rows + j * at.end + at.high + 2 * k * kind.high;
            call.scales[j] = scales[j], call.minima[j] = minima[j];
        }
        call.groups = groups;
        run_few_rows(kind, call, wide * at.end);
    }
    finish<bf16>(args, sums, MR * kLanes, 0, MR, block, NV);
}

template <int MR>
HG_INLINE void linear_few_rows(const LinearArgs& args, const BlockKind& kind, const BlockLayout& at, int64_t block,
                               int64_t wide) {
    if (wide == 4) return linear_few_rows<MR, 4>(args, kind, at, block, wide);
    if (wide == 2) return linear_few_rows<MR, 2>(args, kind, at, block, wide);
    linear_few_rows<MR, 1>(args, kind, at, block, wide);
}

// Returns whether it has computed the product.
HG_INLINE bool linear_few_rows(const LinearArgs& args, const BlockKind& kind, const BlockLayout& at, int64_t block,
                               int64_t wide) {
    if (args.M > 3 || (kind.low == 2 && kind.high)) return false;
    if (args.M == 1) linear_few_rows<1>(args, kind, at, block, wide);
    else if (args.M == 2) linear_few_rows<2>(args, kind, at, block, wide);
    else linear_few_rows<3>(args, kind, at, block, wide);
    return true;
}
#endif

// `wide` blocks for all rows.
template <class T> void linear_packed_blocks(const LinearArgs& args, int64_t block, int64_t wide) {
    using Left = typename Product<T>::Left;
    const BlockKind kind = kind_of(args.stored);
    const BlockLayout at = layout_of(kind, args.K);
#if defined(__AVX512BF16__)
    if constexpr (sizeof(T) == sizeof(bf16))
        if (linear_few_rows(args, kind, at, block, wide)) return;
#endif
    alignas(64) T codes[4][kChunk * kLanes];
    alignas(64) float scales[4][kChunk / kLeastGroup * kLanes], minima[4][kChunk / kLeastGroup * kLanes];
    alignas(64) float sums[kPanelTiles * kMaxWide * 2 * kLanes];
    const T* right[4] = {codes[0], codes[1], codes[2], codes[3]};
    const float *scale[4] = {scales[0], scales[1], scales[2], scales[3]};
    const float *minimum[4] = {minima[0], minima[1], minima[2], minima[3]};
    const uint8_t* rows_of_block = static_cast<const uint8_t*>(args.weight) + block * at.end;
    const RowTiles tiles(args.M);
    const int64_t chunk = chunk_of(kind, args.K);
    for (int64_t panel = 0; panel < tiles.count; panel += kPanelTiles) {
        const int64_t last = min64(tiles.count, panel + kPanelTiles), row0 = tiles.start(panel);
        memset(sums, 0, size_t((tiles.start(last) - row0) * wide * kLanes) * sizeof(float));
        for (int64_t k = 0; k < args.K; k += chunk) {
            const int64_t columns = min64(chunk, args.K - k), group = k / kind.group;
            for (int64_t j = 0; j < wide; ++j) {
                const uint8_t* rows = rows_of_block + j * at.end;
                unpack_columns(codes[j], rows, kind, at, k, columns, wide * at.end);
                unpack_scales(args.stored, rows, kind, at, group, columns / kind.group, wide * at.end, scales[j], minima[j]);
            }
            for (int64_t t = panel; t < last; ++t) {
                const int64_t row = tiles.start(t), rows = tiles.size(t), fits = widest(rows, wide);
                const Left* left = static_cast<const Left*>(args.scratch) + row * entries_of<T>(args.K) +
                                   entries_of<T>(k) * rows;
                const float* sums_of_left =
                    kind.minima ? left_sums(args) + row * (args.K / kind.group) + group * rows : nullptr;
                for (int64_t j = 0; j < wide; j += fits)
                    run_block_tile<T>(rows, fits, {sums + ((row - row0) * wide + j * rows) * kLanes, left, sums_of_left,
                                                   right + j, scale + j, minimum + j, columns / kind.group,
                                                   kind.group / Product<T>::kDepth});
            }
        }
        for (int64_t t = panel; t < last; ++t) {
            const int64_t row = tiles.start(t), rows = tiles.size(t);
            finish<T>(args, sums + (row - row0) * wide * kLanes, rows * kLanes, row, rows, block, wide);
        }
    }
}

}  // namespace HEADGATE_ISA
}  // namespace headgate
