// One instruction set's kernels. Compiled once per set, with its flags and -DHEADGATE_ISA=<name in table.h>.
#include "amx.h"
#include "attention.h"
#include "elementwise.h"
#include "experts.h"
#include "gemm.h"
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

HG_BY_DTYPE(pack, PackArgs, pack_rows)
HG_BY_DTYPE(unpack, PackArgs, unpack_rows)
HG_BY_DTYPE(rms_norm, NormArgs, rms_norm_rows)
HG_BY_DTYPE(rope_and_write, RopeArgs, rope_and_write_tokens)
HG_BY_DTYPE(copy_kv, CopyKvArgs, copy_kv_tokens)
HG_BY_DTYPE(attention, AttentionArgs, attend)
HG_BY_DTYPE(combine, CombineArgs, combine_rows)

static void linear(const Runtime& runtime, const LinearArgs* products, int64_t count) {
    if (count && products->dtype == Dtype::bf16) linear_vector<bf16>(runtime, products, count);
    else linear_vector<float>(runtime, products, count);
}
template <class Tiles> void linear_on(const Runtime& runtime, const LinearArgs* products, int64_t count) {
    if (count && products->dtype == Dtype::bf16) linear_tiles<Tiles>(runtime, products, count);
    else linear_vector<float>(runtime, products, count);
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

Kernels kernels(Tiles tiles) {
    Kernels out{scratch_bytes, linear, route, combine, pack, unpack, rms_norm, rope_and_write,
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
