// The interface between the instruction-set files and the binding: plain structs and function pointers, no torch
// types.
//
// Every function may be called from any thread and splits its work with `Runtime`; which thread does which part never
// changes a bit of the result. Strides count elements; innermost dimensions are contiguous.
#pragma once

#include <cstdint>

namespace headgate {

enum class Dtype : int { f32 = 0, bf16 = 1 };

// How a packed weight stores its numbers: in the dtype, or in a kind of GGUF block (blocks.h).
enum class Stored : int { numbers, q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k };

// Runs work on the thread team (thread_team.h) through a function pointer, so that kernels do not depend on it.
struct Runtime {
    int threads;
    void (*run_on_all)(int threads, void (*body)(void*), void* argument);
};

constexpr int64_t kLanes = 16;         // rows of a weight block, tokens of a key chunk
constexpr int64_t kMaxHeadSize = 256;

// How a product of gate and up blocks becomes one number per pair of them.
enum class Gate : int {
    none,     // there are no pairs
    silu,     // silu(gate) * up
    gelu,     // gelu(gate) * up, with the tanh approximation of gelu
    clamped,  // gate * sigmoid(alpha * gate) * (up + 1), of values clamped to the limit
};

struct Gating {
    Gate gate;
    float alpha, limit;  // of a clamped gate
};

struct LinearArgs {
    const void* x;          // [M, K], or more rows of which `rows` names M
    int64_t x_stride;
    const int32_t* rows;    // or null
    const void* weight;     // packed
    Stored stored;          // how
    const void* bias;       // [N] in the dtype of x (gated: [2 N], the gate's first), or null
    void* out;              // [M, N]
    int64_t out_stride;
    int64_t M, N, K;
    Dtype dtype, out_dtype;
    Gating gating;          // gated: weight holds gate and up blocks in turn; N counts the rows of one of them
    void* scratch;          // linear_scratch_bytes(M, K)
};

struct RouteArgs {
    const float* logits;  // [tokens, experts]
    const float* bias;    // [experts], added to the scores that experts are chosen by, or null
    int32_t* ids;         // [tokens, top], in descending order of these scores
    float* weights;       // [tokens, top]
    float* scratch;       // [tokens, 3, experts]
    int64_t tokens, experts, top, groups, top_groups;
    bool sigmoid, normalised;
    float scale;
};

struct CombineArgs {
    const void* values;     // [tokens * top, N]
    const int32_t* places;  // [tokens, top]: which row of `values`
    const float* weights;   // [tokens, top]
    void* out;              // [tokens, N]: the weighted sums, in float32 and in the order of `places`
    int64_t tokens, top, N;
    Dtype dtype;
};

struct PackArgs {
    void* packed;
    void* rows;  // plain [count, K]: read by pack, written by unpack
    int64_t row_stride, count, K;
    int64_t first_row;   // pack: rows first_row .. first_row + count
    const int64_t* ids;  // unpack: which rows
    int64_t block_stride, block_offset;  // 2 and 0 or 1 for gate and up in turn, else 1 and 0
    Dtype dtype;
    Stored stored;  // in GGUF blocks: pack reads rows as in the file, `row_stride` bytes apart; unpack writes `dtype`
};

struct NormArgs {
    const void* x;  // [rows, K]
    int64_t x_stride;
    void* residual;  // [rows, K], summed in place, or null
    const void* weight;
    void* out;
    int64_t rows, K;
    float eps;
    Dtype dtype;
    bool wide;  // the weight is float32 and multiplies before the result is rounded
};

struct KvCache {
    void* k;
    void* v;
    int64_t block_size, kv_heads, head_size;
};

struct RopeArgs {
    void* qkv;  // [T, (H + 2 HK) D]; q is rotated in place, k and v go to the cache
    int64_t qkv_stride, tokens, heads;
    const int64_t* positions;
    const int64_t* slots;  // negative: do not write
    const float *cos, *sin;  // [positions, rotary]
    int64_t rotary;
    const void *q_weight, *k_weight;  // [D] or null
    float eps;
    KvCache cache;
    Dtype dtype;
    bool wide;  // the weights are float32; see NormArgs
};

struct CopyKvArgs {
    KvCache cache;
    const int64_t* slots;
    int64_t tokens;
    void *k, *v;  // [tokens, HK, D]
    bool to_cache;
    Dtype dtype;
};

struct AttentionArgs {
    const void* q;  // [T, H, D], the last two contiguous
    int64_t q_stride;
    void* out;  // [T, H, D]
    int64_t heads;
    KvCache cache;
    const int32_t *query_starts, *context_lens, *block_tables;
    int64_t sequences, table_stride;
    float scale;
    int64_t window;
    float cap;           // scores become cap * tanh(score / cap), unless it is 0
    const float* sinks;  // [H]: the score of one more key of each head, whose value is zero, or null
    Dtype dtype;
};

struct SampleArgs {
    const float* logits;  // [rows, vocab]
    int64_t logits_stride, rows, vocab;
    const float *temperature, *top_p, *min_p;
    const int32_t* top_k;
    const int64_t* keys;
    int64_t* out;
};

struct StatsArgs {
    const float* logits;
    int64_t logits_stride, rows, vocab;
    float *maximum, *log_sum_exp;
};

struct Kernels {
    int64_t (*linear_scratch_bytes)(int64_t M, int64_t K);
    int64_t (*block_bytes)(Stored, int64_t K);  // of 16 packed rows in GGUF blocks
    // Several products, whose parts the threads share as if they were one.
    void (*linear)(const Runtime&, const LinearArgs* products, int64_t count);
    void (*route)(const Runtime&, const RouteArgs&);
    void (*combine)(const Runtime&, const CombineArgs&);
    void (*pack)(const Runtime&, const PackArgs&);
    void (*unpack)(const Runtime&, const PackArgs&);
    void (*rms_norm)(const Runtime&, const NormArgs&);
    void (*rope_and_write)(const Runtime&, const RopeArgs&);
    void (*copy_kv)(const Runtime&, const CopyKvArgs&);
    void (*attention)(const Runtime&, const AttentionArgs&);
    void (*sample)(const Runtime&, const SampleArgs&);
    void (*log_softmax_stats)(const Runtime&, const StatsArgs&);
    void (*probe_read)(const Runtime&, const void* data, int64_t bytes);
    int64_t (*probe_multiply)(const Runtime&, Dtype, int64_t steps);
};

enum class Tiles { none, hardware, emulated };

// One per compiled instruction set; `tiles` selects how bf16 matrices are multiplied.
namespace avx2 { Kernels kernels(Tiles tiles); }
namespace avx512 { Kernels kernels(Tiles tiles); }
namespace avx512bf16 { Kernels kernels(Tiles tiles); }

}  // namespace headgate
