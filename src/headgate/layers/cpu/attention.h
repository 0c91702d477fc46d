// Causal attention over the paged cache, prefill and decode in one.
//
// A row is one query token of one head; the rows of all heads that share a KV head, and of neighbouring tokens,
// run together over each tile of keys and values. What a row computes depends on its own position only:
//   - tiles of 64 and splits of 512 tokens start at absolute positions, so a lone decode row and the same row
//     amid a prefill see the same tiles, maxima, roundings and order of additions;
//   - a masked token has probability exactly 0, and adding it changes nothing (denormals are flushed, since
//     the bf16 instruction flushes them too; a zero gets its sign at the end);
//   - each split is a softmax of its own; splits are merged in order, whether one thread or many computed them.
// Slots beyond the context may hold anything, NaN included. Values of the sequence itself must be finite.
#pragma once

#include <cstdlib>

#include "elementwise.h"

namespace headgate {
namespace HEADGATE_ISA {

constexpr int64_t kTileTokens = 64, kTileChunks = kTileTokens / kLanes, kSplitTokens = 512;
constexpr int64_t kGroups = 4, kTaskRows = kGroups * kMaxRows;
constexpr float kNothingSeen = -1e30f;

// Flushes denormals during its lifetime.
struct FlushDenormals {
    unsigned saved = _mm_getcsr();
    FlushDenormals() { _mm_setcsr(saved | 0x8040); }
    ~FlushDenormals() { _mm_setcsr(saved); }
};

// The keys and values of one sequence and one KV head, as chunks of 16 tokens.
template <class T> struct Context {
    const AttentionArgs& args;
    const int32_t* table;
    int64_t head, length, head_size, padded, chunks_per_block;
    alignas(64) T tail[kLanes * kMaxHeadSize];

    Context(const AttentionArgs& args, int64_t sequence, int64_t head)
        : args(args), table(args.block_tables + sequence * args.table_stride), head(head),
          length(args.context_lens[sequence]), head_size(args.cache.head_size),
          padded(ceil_div(head_size, kLanes) * kLanes), chunks_per_block(args.cache.block_size / kLanes) {
        if (length % kLanes) copy_tail();
    }
    int64_t chunk_index(int64_t chunk) const {
        return (table[chunk / chunks_per_block] * args.cache.kv_heads + head) * chunks_per_block +
               chunk % chunks_per_block;
    }
    const T* keys(int64_t chunk) const {
        return static_cast<const T*>(args.cache.k) + chunk_index(chunk) * kLanes * head_size;
    }
    const T* stored_values(int64_t chunk) const {
        return static_cast<const T*>(args.cache.v) + chunk_index(chunk) * kLanes * padded;
    }
    const T* values(int64_t chunk) const { return chunk == length / kLanes ? tail : stored_values(chunk); }

    // The last, partly filled chunk of V with zeros where nothing was written yet: 0 times a stale NaN is NaN.
    void copy_tail() {
        constexpr int64_t depth = Product<T>::kDepth;
        const int64_t filled = length % kLanes;
        memcpy(tail, stored_values(length / kLanes), size_t(kLanes * padded) * sizeof(T));
        for (int64_t token = filled; token < kLanes; ++token)
            for (int64_t d = 0; d < padded; ++d) tail[(token / depth * padded + d) * depth + token % depth] = T{};
    }
};

// Up to kMaxRows rows that go through the multiplications together, with the softmax of the current split.
template <class T> struct RowGroup {
    using P = Product<T>;
    using Left = typename P::Left;
    static constexpr int kProbabilityEntries = int(kTileTokens) / P::kDepth * P::kEntries;

    int64_t rows = 0, first_seen = 0, last_seen = 0;  // positions seen by any row
    int64_t position[kMaxRows], start[kMaxRows];      // row r sees start[r] .. position[r]
    float top[kMaxRows];
    alignas(64) float sum[kMaxRows][kLanes];
    alignas(64) float acc[kMaxHeadSize * kMaxRows];  // [D' / 16][rows][16]
    alignas(64) Left q[kMaxHeadSize * kMaxRows];     // packed for `tile`

    void begin_split(int64_t padded) {
        for (int64_t r = 0; r < rows; ++r) top[r] = kNothingSeen;
        memset(sum, 0, sizeof(sum));
        memset(acc, 0, size_t(rows * padded) * sizeof(float));
    }

    void add_tile(const Context<T>& context, int64_t tile, bool more_follow) {
        const int64_t from = max64(tile * kTileChunks, first_seen / kLanes);
        const int64_t to = min64((tile + 1) * kTileChunks, last_seen / kLanes + 1);
        if (from >= to) return;
        alignas(64) float scores[kTileChunks * kMaxRows * kLanes];
        alignas(64) Left probabilities[kMaxRows * kProbabilityEntries];
        score(context, from, to, more_follow, scores);
        for (int64_t r = 0; r < rows; ++r)
            soften(r, context, from, to - from, scores, probabilities + r * kProbabilityEntries);
        add_values(context, from, to, more_follow, probabilities);
    }

    void score(const Context<T>& context, int64_t from, int64_t to, bool more_follow, float* scores) {
        const T *right[kTileChunks], *next[kTileChunks];
        const int64_t last = ceil_div(context.length, kLanes) - 1, count = to - from;
        for (int64_t c = 0; c < count; ++c) {
            right[c] = context.keys(from + c);
            next[c] = context.keys(min64(last, from + c + kTileChunks));
        }
        for (int64_t c = 0; c < count;) {
            const int64_t wide = widest(rows, count - c);
            Ahead<T> ahead;
            if (more_follow) ahead = {next + c, 0, 0};
            run_tile<T, 0>(rows, wide, {scores + c * rows * kLanes, false, q, right + c, 1,
                                        steps_of<T>(context.head_size), kLanes * P::kDepth, ahead});
            c += wide;
        }
    }

    // Scores of row r to probabilities relative to the highest score seen so far in this split.
    HG_INLINE void soften_chunks(RowGroup& self, int64_t r, float scale, float cap, int64_t from, int64_t count,
                                 const float* scores, Left* out, int64_t padded) {
        f32x16 s[kTileChunks], highest = set1(kNothingSeen);
        mask16 seen[kTileChunks];
        for (int64_t c = 0; c < count; ++c) {
            const int64_t base = (from + c) * kLanes;
            const uint32_t below = uint32_t(max64(0, min64(kLanes, self.start[r] - base)));
            const uint32_t upto = uint32_t(max64(0, min64(kLanes, self.position[r] + 1 - base)));
            seen[c] = mask_from_bits(((1u << upto) - 1) & ~((1u << below) - 1));
            s[c] = mul(load(scores + (c * self.rows + r) * kLanes), set1(scale));
            if (cap > 0) s[c] = mul(set1(cap), tanh(mul(s[c], set1(1.0f / cap))));
            highest = vmax(highest, select(seen[c], s[c], set1(kNothingSeen)));
        }
        const float old = self.top[r], now = reduce_max(highest);
        if (now > old) {
            self.top[r] = now;
            rescale(self, r, exp(set1(old - now)), padded);
        }
        f32x16 sum = load(self.sum[r]);
        for (int64_t c = 0; c < count; ++c) {
            f32x16 p = select(seen[c], exp(sub(s[c], set1(self.top[r]))), zero());
            sum = add(sum, p);
            store_probabilities(out, c, p);
        }
        store(self.sum[r], sum);
    }
    void soften(int64_t r, const Context<T>& context, int64_t from, int64_t count, const float* scores, Left* out) {
        if (position[r] < from * kLanes || start[r] >= (from + count) * kLanes) {
            memset(out, 0, kProbabilityEntries * sizeof(Left));
            return;
        }
        soften_chunks(*this, r, context.args.scale, context.args.cap, from, count, scores, out, context.padded);
    }
    HG_INLINE void rescale(RowGroup& self, int64_t r, f32x16 factor, int64_t padded) {
        store(self.sum[r], mul(load(self.sum[r]), factor));
        for (int64_t d = 0; d < padded / kLanes; ++d) {
            float* p = self.acc + (d * self.rows + r) * kLanes;
            store(p, mul(load(p), factor));
        }
    }
    HG_INLINE void store_probabilities(uint32_t* row, int64_t chunk, f32x16 p) {
        store(reinterpret_cast<bf16*>(row) + chunk * kLanes, p);
    }
    HG_INLINE void store_probabilities(float* row, int64_t chunk, f32x16 p) {
        store(row + chunk * kLanes, round_to<T>(p));
    }

    void add_values(const Context<T>& context, int64_t from, int64_t to, bool more_follow, const Left* left) {
        const T *chunk[kTileChunks], *chunk_next[kTileChunks], *right[kTileChunks * 4], *next[kTileChunks * 4];
        const int64_t last = ceil_div(context.length, kLanes) - 1, count = to - from;
        for (int64_t c = 0; c < count; ++c) {
            chunk[c] = context.values(from + c);
            chunk_next[c] = context.values(min64(last, from + c + kTileChunks));
        }
        const int64_t blocks = context.padded / kLanes;
        for (int64_t b = 0; b < blocks;) {
            const int64_t wide = widest(rows, blocks - b);
            for (int64_t c = 0; c < count; ++c)
                for (int64_t j = 0; j < wide; ++j) {
                    right[c * wide + j] = chunk[c] + (b + j) * kLanes * P::kDepth;
                    next[c * wide + j] = chunk_next[c] + (b + j) * kLanes * P::kDepth;
                }
            Ahead<T> ahead;
            if (more_follow) ahead = {next, 0, 0};
            run_tile<T, kProbabilityEntries>(rows, wide, {acc + b * rows * kLanes, true, left, right, count,
                                                          kLanes / P::kDepth, context.padded * P::kDepth, ahead});
            b += wide;
        }
    }
};

// The softmax of one row over one split, or over several merged ones: highest score, sum, weighted values.
struct Partial {
    float top, sum;
    float* values;  // [D']
};

template <class T> HG_INLINE void export_row(const RowGroup<T>& group, int64_t r, int64_t padded, Partial& out) {
    out.top = group.top[r];
    out.sum = reduce_add(load(group.sum[r]));
    for (int64_t d = 0; d < padded; d += kLanes)
        store(out.values + d, load(group.acc + (d / kLanes * group.rows + r) * kLanes));
}

HG_INLINE void merge(Partial& into, const Partial& next, int64_t padded) {
    if (next.top == kNothingSeen) return;
    const bool first = into.top == kNothingSeen;
    const float top = next.top > into.top ? next.top : into.top;
    const f32x16 keep = first ? zero() : exp(set1(into.top - top)), take = exp(set1(next.top - top));
    into.top = top;
    into.sum = first_lane(fma(set1(next.sum), take, mul(set1(into.sum), keep)));
    for (int64_t d = 0; d < padded; d += kLanes) {
        f32x16 kept = first ? zero() : mul(load(into.values + d), keep);
        store(into.values + d, fma(load(next.values + d), take, kept));
    }
}

// Rows first .. first + rows of one sequence and KV head, over one split or (split < 0) all of them.
struct AttentionTask {
    int32_t sequence, head, first, rows, split, splits;
    int64_t partials;  // index of the first Partial, when splits are computed apart
};

template <class T> struct Attention {
    const AttentionArgs& args;
    int64_t shared, padded;  // query heads per KV head, head size rounded up

    explicit Attention(const AttentionArgs& args)
        : args(args), shared(args.heads / args.cache.kv_heads),
          padded(ceil_div(args.cache.head_size, kLanes) * kLanes) {}

    int64_t query_length(int64_t s) const { return args.query_starts[s + 1] - args.query_starts[s]; }
    int64_t position(int64_t s, int64_t row) const {
        return args.context_lens[s] - query_length(s) + row / shared;
    }
    int64_t first_seen(int64_t position) const {
        return args.window > 0 ? max64(0, position - args.window + 1) : 0;
    }
    int64_t row_offset(const AttentionTask& task, int64_t row, int64_t stride) const {
        const int64_t token = args.query_starts[task.sequence] + row / shared;
        return token * stride + (task.head * shared + row % shared) * args.cache.head_size;
    }

    void load_group(const AttentionTask& task, int64_t row, int64_t rows, RowGroup<T>& group) const {
        group.rows = rows;
        for (int64_t r = 0; r < rows; ++r) {
            const T* q = static_cast<const T*>(args.q) + row_offset(task, row + r, args.q_stride);
            pack_left(group.q + r, rows, q, args.cache.head_size);
            group.position[r] = position(task.sequence, row + r);
            group.start[r] = first_seen(group.position[r]);
        }
        group.first_seen = group.start[0];
        group.last_seen = group.position[rows - 1];
    }

    void finish_row(const AttentionTask& task, int64_t row, const Partial& result) const {
        T* out = static_cast<T*>(args.out) + row_offset(task, row, args.heads * args.cache.head_size);
        const float* sink = args.sinks ? args.sinks + task.head * shared + row % shared : nullptr;
        const float sum = sink ? result.sum + first_lane(exp(set1(*sink - result.top))) : result.sum;
        const f32x16 inverse = set1(1.0f / sum);
        for (int64_t d = 0; d < args.cache.head_size; d += kLanes) {
            // + 0 turns a negative zero, which masked tokens may or may not have touched, into the positive one
            f32x16 value = add(mul(load(result.values + d), inverse), zero());
            store_n(out + d, value, min64(kLanes, args.cache.head_size - d));
        }
    }

    // partials[row of task], for one split or for all merged.
    void run(const AttentionTask& task, Partial* partials) const {
        const Context<T> context(args, task.sequence, task.head);
        RowGroup<T> groups[kGroups];
        const RowTiles tiles(task.rows);
        for (int64_t g = 0; g < tiles.count; ++g)
            load_group(task, task.first + tiles.start(g), tiles.size(g), groups[g]);
        alignas(64) float values[kMaxHeadSize];
        const int64_t first_split = task.split < 0 ? groups[0].first_seen / kSplitTokens : task.split;
        const int64_t end_split = task.split < 0 ? task.splits : task.split + 1;
        for (int64_t r = 0; r < task.rows; ++r) partials[r].top = kNothingSeen;
        for (int64_t split = first_split; split < end_split; ++split) {
            run_split(context, split, groups, tiles.count);
            for (int64_t r = 0, g = 0; r < task.rows; ++r) {
                if (r == tiles.start(g + 1)) ++g;
                Partial of_split{0, 0, values};
                export_row(groups[g], r - tiles.start(g), padded, of_split);
                merge(partials[r], of_split, padded);
            }
        }
    }

    void run_split(const Context<T>& context, int64_t split, RowGroup<T>* groups, int64_t count) const {
        for (int64_t g = 0; g < count; ++g) groups[g].begin_split(padded);
        const int64_t from = max64(split * kSplitTokens, groups[0].first_seen) / kTileTokens;
        const int64_t last = groups[count - 1].last_seen;
        const int64_t end = min64((split + 1) * kSplitTokens, last + 1);
        for (int64_t tile = from; tile * kTileTokens < end; ++tile)
            for (int64_t g = 0; g < count; ++g) {
                const bool more = g == 0 && (tile + 1) * kTileTokens <= last;
                groups[g].add_tile(context, tile, more);
            }
    }

    // Heaviest rows of a sequence first, so that the threads end together.
    template <class Emit> void for_each_task(Emit emit) const {
        for (int64_t s = 0; s < args.sequences; ++s) {
            const int64_t rows = query_length(s) * shared;
            for (int64_t head = 0; head < args.cache.kv_heads; ++head)
                for (int64_t tile = ceil_div(rows, kTaskRows) - 1; tile >= 0; --tile) {
                    const int64_t first = tile * kTaskRows, count = min64(kTaskRows, rows - first);
                    const int64_t splits = position(s, first + count - 1) / kSplitTokens + 1;
                    emit(AttentionTask{int32_t(s), int32_t(head), int32_t(first), int32_t(count), -1,
                                       int32_t(splits), 0});
                }
        }
    }

    void run_all(const Runtime& runtime) const {
        int64_t count = 0, pieces = 0;
        for_each_task([&](const AttentionTask& task) { ++count, pieces += task.splits; });
        if (count == 0) return;
        const bool apart = runtime.threads > 1 && count < 4 * runtime.threads && pieces > count;
        auto* tasks = static_cast<AttentionTask*>(malloc(size_t(count) * sizeof(AttentionTask)));
        int64_t i = 0;
        for_each_task([&](const AttentionTask& task) { tasks[i++] = task; });
        if (apart) run_splits_apart(runtime, tasks, count, pieces);
        else run_whole(runtime, tasks, count);
        free(tasks);
    }

    void run_whole(const Runtime& runtime, const AttentionTask* tasks, int64_t count) const {
        for_each_run(runtime, count, [&](int64_t begin, int64_t end) {
            const FlushDenormals flush;
            alignas(64) float values[kTaskRows * kMaxHeadSize];
            Partial partials[kTaskRows];
            for (int64_t i = begin; i < end; ++i) {
                for (int64_t r = 0; r < tasks[i].rows; ++r) partials[r] = {0, 0, values + r * kMaxHeadSize};
                run(tasks[i], partials);
                for (int64_t r = 0; r < tasks[i].rows; ++r) finish_row(tasks[i], tasks[i].first + r, partials[r]);
            }
        });
    }

    // Few rows over a long context: one piece per task and split, merged afterwards in the order of positions.
    void run_splits_apart(const Runtime& runtime, AttentionTask* tasks, int64_t count, int64_t pieces) const {
        auto* pieces_of = static_cast<AttentionTask*>(malloc(size_t(pieces) * sizeof(AttentionTask)));
        int64_t piece = 0, rows = 0;
        for (int64_t i = 0; i < count; ++i) {
            tasks[i].partials = rows;
            for (int32_t split = 0; split < tasks[i].splits; ++split, rows += tasks[i].rows) {
                pieces_of[piece] = tasks[i];
                pieces_of[piece].split = split;
                pieces_of[piece++].partials = rows;
            }
        }
        auto* partials = static_cast<Partial*>(malloc(size_t(rows) * sizeof(Partial)));
        auto* values = static_cast<float*>(aligned_alloc(64, size_t(rows * padded) * sizeof(float)));
        for (int64_t r = 0; r < rows; ++r) partials[r] = {0, 0, values + r * padded};
        for_each_run(runtime, pieces, [&](int64_t begin, int64_t end) {
            const FlushDenormals flush;
            for (int64_t i = begin; i < end; ++i) run(pieces_of[i], partials + pieces_of[i].partials);
        });
        const FlushDenormals flush;
        for (int64_t i = 0; i < count; ++i)
            for (int64_t r = 0; r < tasks[i].rows; ++r) {
                Partial& total = partials[tasks[i].partials + r];
                for (int32_t split = 1; split < tasks[i].splits; ++split)
                    merge(total, partials[tasks[i].partials + split * tasks[i].rows + r], padded);
                finish_row(tasks[i], tasks[i].first + r, total);
            }
        free(values), free(partials), free(pieces_of);
    }
};

}  // namespace HEADGATE_ISA
}  // namespace headgate
