// One instruction set's kernels. Compiled once per set, with its flags and -DHEADGATE_ISA=<name in table.h>.
#include "amx.h"
#include "attention.h"
#include "elementwise.h"
#include "experts.h"
#include "linear.h"
#include "probe.h"
#include "sample.h"
#include "table.h"

namespace headgate {
namespace HEADGATE_ISA {

// Calls the bf16 or the float version of a function template.
#define HG_BY_DTYPE(name, Args, implementation)                                   \
    static void name(const Runtime& runtime, const Args& args) {                  \
        if (args.dtype == Dtype::bf16) implementation<bf16>(runtime, args);       \
        else implementation<float>(runtime, args);                                \
    }

template <class T> void attend(const Runtime& runtime, const AttentionArgs& args) {
    Attention<T>(args).run_all(runtime);
}

template <class T> void pack_as_stored(const Runtime& runtime, const PackArgs& args) {
    if (args.stored == Stored::numbers) pack_rows<T>(runtime, args);
    else pack_block_rows(runtime, args);
}

template <class T> void unpack_as_stored(const Runtime& runtime, const PackArgs& args) {
    if (args.stored == Stored::numbers) unpack_rows<T>(runtime, args);
    else unpack_block_rows<T>(runtime, args);
}

HG_BY_DTYPE(pack, PackArgs, pack_as_stored)
HG_BY_DTYPE(unpack, PackArgs, unpack_as_stored)
HG_BY_DTYPE(rms_norm, NormArgs, rms_norm_rows)
HG_BY_DTYPE(rope_and_write, RopeArgs, rope_and_write_tokens)
HG_BY_DTYPE(copy_kv, CopyKvArgs, copy_kv_tokens)
HG_BY_DTYPE(attention, AttentionArgs, attend)
HG_BY_DTYPE(combine, CombineArgs, combine_rows)

static void linear(const Runtime& runtime, const LinearArgs* products, int64_t count) {
    if (count && products->dtype == Dtype::bf16) linear_vector<bf16>(runtime, products, count);
    else linear_vector<float>(runtime, products, count);
}
// Weights in GGUF blocks are multiplied on vector registers also where there are tiles.
template <class Tiles> void linear_on(const Runtime& runtime, const LinearArgs* products, int64_t count) {
    bool in_blocks = false;
    for (int64_t i = 0; i < count; ++i) in_blocks = in_blocks || products[i].stored != Stored::numbers;
    if (!count || products->dtype != Dtype::bf16 || (in_blocks && count == 1)) return linear(runtime, products, count);
    if (!in_blocks) return linear_tiles<Tiles>(runtime, products, count);
    for (int64_t i = 0; i < count; ++i) linear_on<Tiles>(runtime, products + i, 1);
}

static void route(const Runtime& runtime, const RouteArgs& args) { route_rows(runtime, args); }
static void sample(const Runtime& runtime, const SampleArgs& args) { sample_rows(runtime, args); }
static void log_softmax_stats(const Runtime& runtime, const StatsArgs& args) { stats_rows(runtime, args); }
static void probe_read(const Runtime& runtime, const void* p, int64_t n) { read_everything(runtime, p, n); }
static int64_t probe_multiply(const Runtime& runtime, Dtype dtype, int64_t steps) {
    return dtype == Dtype::bf16 ? multiply_vectors<bf16>(runtime, steps) : multiply_vectors<float>(runtime, steps);
}
template <class Tiles> int64_t probe_multiply_on(const Runtime& runtime, Dtype dtype, int64_t steps) {
    return dtype == Dtype::bf16 ? multiply_tiles<Tiles>(runtime, steps) : multiply_vectors<float>(runtime, steps);
}
static int64_t scratch_bytes(int64_t M, int64_t K) { return linear_scratch_bytes(M, K); }
static int64_t block_bytes(Stored stored, int64_t K) { return packed_block_bytes(stored, K); }

Kernels kernels(Tiles tiles) {
    Kernels out{scratch_bytes, block_bytes, linear, route, combine, pack, unpack, rms_norm, rope_and_write,
                copy_kv, attention, sample, log_softmax_stats, probe_read, probe_multiply};
    if (tiles == Tiles::emulated) {
        out.linear = linear_on<EmulatedTiles>;
        out.probe_multiply = probe_multiply_on<EmulatedTiles>;
    } else if (tiles == Tiles::hardware) {
        out.linear = linear_on<HardwareTiles>;
        out.probe_multiply = probe_multiply_on<HardwareTiles>;
    }
    return out;
}

}  // namespace HEADGATE_ISA
}  // namespace headgate
