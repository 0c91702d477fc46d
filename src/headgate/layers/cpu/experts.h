// Mixtures of experts: the choice of each token's experts, and the weighted sum of what they give. Between the two are
// products of `gemm.h`, one per expert.
#pragma once

#include "parallel.h"
#include "simd.h"

namespace headgate {
namespace HEADGATE_ISA {

constexpr float kNever = -__builtin_inff();

// The score of each of `n` experts, rounded as its own lane: it depends on no other token.
HG_INLINE void score_experts(float* scores, const float* logits, int64_t n, bool sigmoid) {
    float largest = kNever, total = 0.0f;
    for (int64_t e = 0; e < n; ++e) largest = max32(largest, logits[e]);
    for (int64_t e = 0; e < n; e += kLanes) {
        const int64_t lanes = min64(kLanes, n - e);
        const f32x16 value = load_n(logits + e, lanes);
        if (sigmoid) store_n(scores + e, div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), value)))), lanes);
        else store_n(scores + e, exp(sub(value, set1(largest))), lanes);
    }
    if (sigmoid) return;
    for (int64_t e = 0; e < n; ++e) total += scores[e];
    for (int64_t e = 0; e < n; ++e) scores[e] /= total;
}

HG_INLINE int64_t best_of(const float* values, int64_t n) {
    int64_t best = 0;
    for (int64_t i = 1; i < n; ++i)
        if (values[i] > values[best]) best = i;
    return best;
}

// The sum of the two best scores of a group, or its only one.
HG_INLINE float group_score(const float* scores, int64_t n) {
    float first = kNever, second = kNever;
    for (int64_t e = 0; e < n; ++e) {
        if (scores[e] > first) second = first, first = scores[e];
        else if (scores[e] > second) second = scores[e];
    }
    return n > 1 ? first + second : first;
}

// Makes scores outside the best groups minus infinity. `by_group` has room for a number per group.
HG_INLINE void keep_best_groups(float* scores, float* by_group, const RouteArgs& args) {
    const int64_t size = args.experts / args.groups;
    for (int64_t g = 0; g < args.groups; ++g) by_group[g] = group_score(scores + g * size, size);
    for (int64_t i = 0; i < args.top_groups; ++i) by_group[best_of(by_group, args.groups)] = kNever;
    for (int64_t g = 0; g < args.groups; ++g)
        if (by_group[g] != kNever)  // not among the best
            for (int64_t e = g * size; e < (g + 1) * size; ++e) scores[e] = kNever;
}

HG_INLINE void route_token(const RouteArgs& args, int64_t token) {
    const int64_t n = args.experts;
    float *scores = args.scratch + token * 3 * n, *chosen_by = scores + n, *weights = args.weights + token * args.top;
    score_experts(scores, args.logits + token * n, n, args.sigmoid);
    for (int64_t e = 0; e < n; ++e) chosen_by[e] = args.bias ? scores[e] + args.bias[e] : scores[e];
    if (args.groups > 1) keep_best_groups(chosen_by, scores + 2 * n, args);
    float total = 0.0f;
    for (int64_t i = 0; i < args.top; ++i) {
        const int64_t best = best_of(chosen_by, n);
        chosen_by[best] = kNever;
        args.ids[token * args.top + i] = int32_t(best);
        weights[i] = scores[best];
        total = i ? total + weights[i] : weights[i];
    }
    const float divisor = args.normalised ? total + 1e-20f : 1.0f;
    for (int64_t i = 0; i < args.top; ++i) weights[i] = weights[i] / divisor * args.scale;
}

HG_INLINE void route_rows(const Runtime& runtime, const RouteArgs& args) {
    for_each_run_if_worth(runtime, args.tokens, args.tokens * args.experts, [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; ++t) route_token(args, t);
    });
}

template <class T> void combine_rows(const Runtime& runtime, const CombineArgs& args) {
    for_each_run_if_worth(runtime, args.tokens, args.tokens * args.top * args.N, [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; ++t)
            for (int64_t k = 0; k < args.N; k += kLanes) {
                const int64_t n = min64(kLanes, args.N - k);
                f32x16 sum = zero();
                for (int64_t i = t * args.top; i < (t + 1) * args.top; ++i) {
                    const T* row = static_cast<const T*>(args.values) + args.places[i] * args.N;
                    sum = add(sum, mul(load_n(row + k, n), set1(args.weights[i])));
                }
                store_n(static_cast<T*>(args.out) + t * args.N + k, sum, n);
            }
    });
}

}  // namespace HEADGATE_ISA
}  // namespace headgate
