// Sampling: one token per row of logits, without sorting the vocabulary.
//
// The draw is an argmax over scaled logit + Gumbel noise, and the noise of entry i is a hash of (key, i): it does
// not depend on the batch, and the three filters only say which entries may win. Each filter is therefore turned
// into one threshold on the scaled logit. top-k and top-p find theirs with a histogram of the entries near
// the maximum; only the bucket that holds the threshold is looked at entry by entry.
#pragma once

#include <cstdlib>

#include "parallel.h"
#include "simd.h"

namespace headgate {
namespace HEADGATE_ISA {

constexpr float kInfinity = __builtin_inff();
// No Gumbel noise made from a 24-bit uniform exceeds -log(-log(1 - 2^-25)) = 17.33.
constexpr float kLargestNoise = 17.4f;

constexpr float kUnit = 5.9604644775390625e-8f;  // 2^-24

// 24 random bits n for each of entries first .. first + 16; the uniform number is u = (n + 1/2) / 2^24.
HG_INLINE i32x16 random_bits(uint64_t key, uint32_t first) {
    i32x16 x = iadd(imul(iadd(iota(), iset1(first)), iset1(0x9E3779B9)), iset1(uint32_t(key)));
    x = ixor(x, iset1(uint32_t(key >> 32)));
    x = imul(ixor(x, shift_right<16>(x)), iset1(0x7feb352d));
    x = imul(ixor(x, shift_right<15>(x)), iset1(0x846ca68b));
    return shift_right<8>(ixor(x, shift_right<16>(x)));
}

// 1 - u, exact wherever it is at most 1/2.
HG_INLINE f32x16 below_one(i32x16 n) {
    const i32x16 rest = iadd(iset1(1u << 24), imul(n, iset1(uint32_t(-1))));
    return mul(sub(to_float(rest), set1(0.5f)), set1(kUnit));
}

// -log(-log(u)). u does not fit a float when n >= 2^23 (it would round to 1, and its noise to infinity), but 1 - u
// does; the inner logarithm is taken from whichever is exact.
HG_INLINE f32x16 gumbel(i32x16 n) {
    const f32x16 u = mul(add(to_float(n), set1(0.5f)), set1(kUnit)), rest = below_one(n);
    const f32x16 near_one = log_reduced(sub(zero(), rest), zero());
    const f32x16 log_u = select(less(rest, set1(0.29f)), near_one, log(u));
    return sub(zero(), log(sub(zero(), log_u)));
}

// One row of logits divided by its temperature. Lanes beyond the vocabulary read as minus infinity.
struct ScaledRow {
    const float* logits;
    int64_t vocab;
    float temperature;
    HG_INLINE f32x16 at(const ScaledRow& row, int64_t i) {
        const int64_t n = row.vocab - i;
        if (n >= kLanes) return div(load(row.logits + i), set1(row.temperature));
        return select(first_lanes(n), div(load_n(row.logits + i, n), set1(row.temperature)), set1(-kInfinity));
    }
};

struct Best {
    float value;
    int64_t index;
};

// The largest entry, the first of equals.
HG_INLINE Best largest(const ScaledRow& row) {
    f32x16 highest = set1(-kInfinity);
    for (int64_t i = 0; i < row.vocab; i += kLanes) highest = vmax(ScaledRow::at(row, i), highest);
    const float value = reduce_max(highest);
    for (int64_t i = 0; i < row.vocab; i += kLanes) {
        const uint32_t hits = lane_bits(greater_equal(ScaledRow::at(row, i), set1(value)));
        if (hits) return {value, min64(row.vocab - 1, i + __builtin_ctz(hits))};
    }
    return {value, 0};  // all NaN
}

// Counts and probability masses by distance from the maximum: 64 buckets a nat, the last for all that is farther
// than 16 nats. Masses are relative to the maximum's.
struct Histogram {
    static constexpr int kPerNat = 64, kBuckets = 16 * kPerNat + 1, kFar = kBuckets - 1;
    int64_t count[kBuckets] = {};
    double mass[kBuckets] = {};

    HG_INLINE f32x16 bucket(f32x16 scaled, float highest) {
        return vmin(mul(sub(set1(highest), scaled), set1(float(kPerNat))), set1(float(kFar)));
    }
    Histogram(const ScaledRow& row, float highest) {
        count[kFar] = row.vocab;
        f32x16 far = zero();
        for (int64_t i = 0; i < row.vocab; i += kLanes) {
            const f32x16 scaled = ScaledRow::at(row, i);
            const f32x16 p = exp(sub(scaled, set1(highest)));
            const f32x16 where = bucket(scaled, highest);
            const mask16 near = less(where, set1(float(kFar)));
            const f32x16 far_p = select(near, zero(), p);
            far = add(far, row.vocab - i >= kLanes ? far_p : select(first_lanes(row.vocab - i), far_p, zero()));
            add_near(lane_bits(near), where, p);
            if ((i / kLanes) % 256 == 255) mass[kFar] += reduce_add(far), far = zero();
        }
        mass[kFar] += reduce_add(far);
    }
    void add_near(uint32_t lanes, f32x16 where, f32x16 p) {
        if (!lanes) return;
        int32_t index[kLanes];
        float value[kLanes];
        istore(index, to_int(where));
        store(value, p);
        for (; lanes; lanes &= lanes - 1) {
            const int lane = __builtin_ctz(lanes);
            ++count[index[lane]];
            --count[kFar];
            mass[index[lane]] += double(value[lane]);
        }
    }
};

HG_INLINE void swap_floats(float& a, float& b) {
    const float kept = a;
    a = b, b = kept;
}

// Heap sort, largest first. (The standard library's templates stay out of these files, see simd.h.)
HG_INLINE void sort_descending(float* v, int64_t n) {
    const auto sift = [&](int64_t root, int64_t size) {
        for (int64_t child; (child = 2 * root + 1) < size; root = child) {
            if (child + 1 < size && v[child + 1] < v[child]) ++child;
            if (!(v[child] < v[root])) return;
            swap_floats(v[root], v[child]);
        }
    };
    for (int64_t i = n / 2; i-- > 0;) sift(i, n);
    for (int64_t size = n; size-- > 1;) swap_floats(v[0], v[size]), sift(0, size);
}

// The entries of one bucket, largest first.
struct Bucket {
    float* values;
    int64_t size = 0;
    Bucket(const ScaledRow& row, float highest, const Histogram& histogram, int index)
        : values(static_cast<float*>(malloc(size_t(histogram.count[index] + kLanes) * sizeof(float)))) {
        for (int64_t i = 0; i < row.vocab; i += kLanes) {
            const f32x16 scaled = ScaledRow::at(row, i), where = Histogram::bucket(scaled, highest);
            const f32x16 lower = set1(float(index)), upper = set1(index == Histogram::kFar ? kInfinity : index + 1.0f);
            uint32_t lanes = lane_bits(both(greater_equal(where, lower), less(where, upper)));
            if (row.vocab - i < kLanes) lanes &= (1u << (row.vocab - i)) - 1;
            if (!lanes) continue;
            float value[kLanes];
            store(value, scaled);
            for (; lanes; lanes &= lanes - 1) values[size++] = value[__builtin_ctz(lanes)];
        }
        sort_descending(values, size);
    }
    ~Bucket() { free(values); }
    Bucket(const Bucket&) = delete;
};

// The k-th largest value; all that equal it stay.
HG_INLINE float top_k_threshold(const ScaledRow& row, float highest, const Histogram& histogram, int64_t k) {
    int64_t larger = 0;
    for (int b = 0; b < Histogram::kBuckets; ++b) {
        if (larger + histogram.count[b] >= k) {
            const Bucket bucket(row, highest, histogram, b);
            return bucket.size ? bucket.values[min64(bucket.size, k - larger) - 1] : -kInfinity;
        }
        larger += histogram.count[b];
    }
    return -kInfinity;
}

HG_INLINE double mass_of(float value, float highest) { return double(first_lane(exp(set1(value - highest)))); }

// The mass of entries no smaller than `least`, given the histogram's.
HG_INLINE double mass_from(const ScaledRow& row, float highest, const Histogram& histogram, float least) {
    double mass = 0;
    const int last = least == -kInfinity ? Histogram::kFar
                                         : int(first_lane(Histogram::bucket(set1(least), highest)));
    for (int b = 0; b < last; ++b) mass += histogram.mass[b];
    if (least == -kInfinity) return mass + histogram.mass[last];
    const Bucket bucket(row, highest, histogram, last);
    for (int64_t i = 0; i < bucket.size && bucket.values[i] >= least; ++i) mass += mass_of(bucket.values[i], highest);
    return mass;
}

// The smallest value v >= least such that the entries above v have less than `wanted` mass.
HG_INLINE float top_p_threshold(const ScaledRow& row, float highest, const Histogram& histogram, double wanted,
                                float least) {
    double larger = 0;
    for (int b = 0; b < Histogram::kBuckets; ++b) {
        if (larger + histogram.mass[b] < wanted && b != Histogram::kFar) {
            larger += histogram.mass[b];
            continue;
        }
        const Bucket bucket(row, highest, histogram, b);
        float threshold = least;
        for (int64_t i = 0; i < bucket.size; ++i) {
            // A threshold is a value, so its equals are kept with it.
            if (!(larger < wanted)) return max32(threshold, least);
            threshold = bucket.values[i];
            larger += mass_of(bucket.values[i], highest);
        }
        // Rounding can put the end of the mass just behind this bucket: continue with the next one.
        if (larger >= wanted) return max32(threshold, least);
    }
    return least;
}

struct RowParameters {
    float temperature, top_p, min_p;
    int64_t top_k;
    uint64_t key;
};

// Entries below it cannot be drawn.
HG_INLINE float threshold_of(const ScaledRow& row, float highest, const RowParameters& wanted) {
    float threshold = -kInfinity;
    const bool by_rank = wanted.top_k > 0 && wanted.top_k < row.vocab, by_mass = wanted.top_p < 1.0f;
    if (by_rank || by_mass) {
        const Histogram histogram(row, highest);
        if (by_rank) threshold = top_k_threshold(row, highest, histogram, wanted.top_k);
        if (by_mass) {
            const double kept = mass_from(row, highest, histogram, threshold);
            threshold = top_p_threshold(row, highest, histogram, double(wanted.top_p) * kept, threshold);
        }
    }
    if (wanted.min_p > 0.0f) {
        const float least = wanted.min_p < 1.0f ? highest + first_lane(log(set1(wanted.min_p))) : highest;
        threshold = max32(threshold, least);
    }
    return threshold < highest ? threshold : highest;
}

HG_INLINE int64_t sample_row(const float* logits, int64_t vocab, const RowParameters& wanted) {
    if (wanted.temperature == 0.0f) return largest({logits, vocab, 1.0f}).index;
    const ScaledRow row{logits, vocab, wanted.temperature};
    const Best peak = largest(row);
    const float threshold = threshold_of(row, peak.value, wanted);
    // The most likely entry is always a candidate; starting from it, most others need no noise at all.
    Best best{peak.value + first_lane(gumbel(random_bits(wanted.key, uint32_t(peak.index)))), peak.index};
    for (int64_t i = 0; i < vocab; i += kLanes) {
        const f32x16 scaled = ScaledRow::at(row, i);
        const float least = max32(threshold, best.value - kLargestNoise);
        uint32_t lanes = lane_bits(greater_equal(scaled, set1(least)));
        if (vocab - i < kLanes) lanes &= (1u << (vocab - i)) - 1;
        if (!lanes) continue;
        // -log(u) >= 1 - u, so the noise is at most -log(1 - u): enough to rule out nearly all before the logarithms.
        const i32x16 n = random_bits(wanted.key, uint32_t(i));
        const f32x16 reach = mul(exp(sub(scaled, set1(best.value))), set1(1.0001f));
        lanes &= lane_bits(greater_equal(reach, below_one(n)));
        if (!lanes) continue;
        float value[kLanes];
        store(value, add(scaled, gumbel(n)));
        for (; lanes; lanes &= lanes - 1) {
            const int lane = __builtin_ctz(lanes);
            const bool wins = value[lane] > best.value || (value[lane] == best.value && i + lane < best.index);
            if (wins) best = {value[lane], i + lane};
        }
    }
    return best.index;
}

HG_INLINE void sample_rows(const Runtime& runtime, const SampleArgs& args) {
    for_each_run_if_worth(runtime, args.rows, args.rows * args.vocab, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            const RowParameters wanted{args.temperature[i], args.top_p[i], args.min_p[i], args.top_k[i],
                                       uint64_t(args.keys[i])};
            args.out[i] = sample_row(args.logits + i * args.logits_stride, args.vocab, wanted);
        }
    });
}

HG_INLINE void stats_rows(const Runtime& runtime, const StatsArgs& args) {
    for_each_run_if_worth(runtime, args.rows, args.rows * args.vocab, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) {
            const ScaledRow row{args.logits + r * args.logits_stride, args.vocab, 1.0f};
            f32x16 highest = set1(-kInfinity);
            for (int64_t i = 0; i < row.vocab; i += kLanes) highest = vmax(ScaledRow::at(row, i), highest);
            const float top = reduce_max(highest);
            double total = 0;
            f32x16 sum = zero();
            for (int64_t i = 0; i < row.vocab; i += kLanes) {
                const f32x16 p = exp(sub(ScaledRow::at(row, i), set1(top)));
                sum = add(sum, row.vocab - i >= kLanes ? p : select(first_lanes(row.vocab - i), p, zero()));
                // Partial sums stay short: a float that has grown large swallows small addends.
                if ((i / kLanes) % 256 == 255) total += reduce_add(sum), sum = zero();
            }
            total += reduce_add(sum);
            args.maximum[r] = top;
            args.log_sum_exp[r] = float(double(top) + __builtin_log(total));
        }
    });
}

}  // namespace HEADGATE_ISA
}  // namespace headgate
