// The Python binding of the kernels: checks shapes, allocates outputs, detects what the CPU supports.
//
// Compiled without any instruction-set flag, so that this part runs anywhere and can report what is missing. pybind11
// rather than TORCH_LIBRARY: an empty call of four arguments takes 0.8 us against 1.8 (torch 2.13, Zen 4).
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <cpuid.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <optional>
#include <string>
#include <vector>

#include "thread_team.h"
#include "table.h"

namespace headgate {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

bool has_amx() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
    if (!(d & kAmxBf16) || !(d & kAmxTile)) return false;
    // Linux enables the tile registers on request: ARCH_REQ_XCOMP_PERM for XFEATURE_XTILEDATA.
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}

// The instruction sets of this machine, best first. amx-emulated is for tests and never chosen automatically.
std::vector<std::string> supported_isas() {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
    std::vector<std::string> names;
    if (bf16 && has_amx()) names.push_back("amx");
    if (bf16) names.push_back("avx512-bf16");
    if (avx512) names.push_back("avx512");
    if (avx2) names.push_back("avx2"), names.push_back("amx-emulated");
    return names;
}

Kernels kernels_for(const std::string& isa) {
    if (isa == "amx") return avx512bf16::kernels(Tiles::hardware);
    if (isa == "avx512-bf16") return avx512bf16::kernels(Tiles::none);
    if (isa == "avx512") return avx512::kernels(Tiles::none);
    if (isa == "avx2") return avx2::kernels(Tiles::none);
    TORCH_CHECK(isa == "amx-emulated", "unknown instruction set ", isa);
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512bf16") ? avx512bf16::kernels(Tiles::emulated) : avx2::kernels(Tiles::emulated);
}

void run_on_all(int threads, void (*body)(void*), void* argument) {
    ThreadTeam::get().run(threads, body, argument);
}

Runtime runtime() { return {at::in_parallel_region() ? 1 : at::get_num_threads(), run_on_all}; }

Dtype dtype_of(const Tensor& t) {
    if (t.scalar_type() == at::kBFloat16) return Dtype::bf16;
    TORCH_CHECK(t.scalar_type() == at::kFloat, "bfloat16 or float32 expected, not ", t.scalar_type());
    return Dtype::f32;
}

void check_same_dtype(const Tensor& a, const Tensor& b) {
    TORCH_CHECK(a.scalar_type() == b.scalar_type(), "dtypes differ: ", a.scalar_type(), " and ", b.scalar_type());
}

template <class T> T* contiguous_data(const Tensor& t, at::ScalarType type, int64_t numel, const char* what) {
    TORCH_CHECK(t.scalar_type() == type && t.is_contiguous() && t.numel() == numel, what, " must be contiguous ",
                type, " of ", numel, " elements, not ", t.scalar_type(), t.sizes());
    return static_cast<T*>(t.data_ptr());
}

void* optional_data(const MaybeTensor& t, const Tensor& like, int64_t numel, const char* what) {
    return t ? contiguous_data<void>(*t, like.scalar_type(), numel, what) : nullptr;
}

// Whether the weight of a norm is wider than the numbers that it multiplies.
bool is_wide(const Tensor& weight, const Tensor& like) { return weight.scalar_type() != like.scalar_type(); }

void* weight_data(const Tensor& t, const Tensor& like, int64_t numel, const char* what) {
    return contiguous_data<void>(t, is_wide(t, like) ? at::kFloat : like.scalar_type(), numel, what);
}

void* optional_weight(const MaybeTensor& t, const Tensor& like, int64_t numel, const char* what) {
    return t ? weight_data(*t, like, numel, what) : nullptr;
}

void check_rows(const Tensor& t, const char* what) {
    TORCH_CHECK(t.dim() == 2 && (t.stride(1) == 1 || t.size(1) == 1), what, " must have two dimensions, the last contiguous");
}

Tensor output(const MaybeTensor& out, at::IntArrayRef sizes, const Tensor& like, at::ScalarType type) {
    if (!out) return at::empty(sizes, like.options().dtype(type));
    TORCH_CHECK(out->sizes() == sizes && out->scalar_type() == type && out->is_contiguous(),
                "out must be contiguous ", type, sizes, ", not ", out->scalar_type(), out->sizes());
    return *out;
}

// Zeros, in huge pages when large: weights and caches are read sequentially, and each small page costs a page walk.
// Memory that is never touched is never used, so that a matrix can be replaced before it is filled.
Tensor large_zeros(const std::vector<int64_t>& sizes, at::ScalarType type) {
    constexpr size_t kHuge = size_t(2) << 20, kWorthMapping = size_t(1) << 16;
    size_t bytes = c10::elementSize(type);
    for (int64_t size : sizes) bytes *= size_t(size);
    const auto options = at::TensorOptions().dtype(type);
    if (bytes < kWorthMapping) return at::zeros(sizes, options);
    const size_t reserved = bytes < 2 * kHuge ? bytes : bytes + kHuge;
    void* base = mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(base != MAP_FAILED, "cannot reserve ", bytes, " bytes for weights or cache");
    const size_t rounded = reserved == bytes ? 0 : kHuge - 1;
    void* start = reinterpret_cast<void*>((reinterpret_cast<size_t>(base) + rounded) & ~rounded);
    if (rounded) madvise(start, bytes, MADV_HUGEPAGE);  // optional: without it the pages are small, nothing else changes
    return at::from_blob(start, sizes, [base, reserved](void*) { munmap(base, reserved); }, options);
}

KvCache cache_of(const Tensor& k, const Tensor& v, int64_t head_size) {
    const bool bf16 = dtype_of(k) == Dtype::bf16;
    check_same_dtype(k, v);
    TORCH_CHECK(k.is_contiguous() && v.is_contiguous() && k.dim() == (bf16 ? 6 : 5) && v.dim() == (bf16 ? 5 : 4),
                "not a cache made by empty_kv");
    const int64_t block_size = k.size(2) * kLanes, own_head_size = k.size(3) * (bf16 ? 2 : 1);
    TORCH_CHECK(own_head_size == head_size, "the cache holds heads of ", own_head_size, ", not ", head_size);
    return {k.data_ptr(), v.data_ptr(), block_size, k.size(1), head_size};
}

// The GGUF kinds of block of a packed weight, by name; the empty name is for numbers of the dtype.
Stored stored_as(const std::string& kind) {
    static const char* const names[] = {"", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"};
    for (int i = 0; i < int(std::size(names)); ++i)
        if (kind == names[i]) return Stored(i);
    TORCH_CHECK(false, "unknown kind of block ", kind);
}

// How the rows of a weight in GGUF blocks lie in a file: columns and bytes per block.
struct FileBlock {
    int64_t columns, bytes;
};

FileBlock file_block(Stored stored) {
    switch (stored) {
        case Stored::q4_0: return {32, 18};
        case Stored::q4_1: return {32, 20};
        case Stored::q5_0: return {32, 22};
        case Stored::q5_1: return {32, 24};
        case Stored::q8_0: return {32, 34};
        case Stored::q2_k: return {256, 84};
        case Stored::q3_k: return {256, 110};
        case Stored::q4_k: return {256, 144};
        case Stored::q5_k: return {256, 176};
        default: return {256, 210};
    }
}

// Rows of one matrix that are stored alike: the packed weight, its rows, the kind of block.
using Part = std::tuple<Tensor, int64_t, std::string>;

// Pairs of a token and one of its experts, those of an expert side by side; experts without tokens are left out.
struct PairsByExpert {
    std::vector<int32_t> tokens, places;  // the token of each place; the place of each pair
    std::vector<int64_t> experts, starts;  // expert i has the places starts[i] .. starts[i + 1]

    PairsByExpert(const int32_t* ids, int64_t pairs, int64_t top, int64_t count) : tokens(pairs), places(pairs) {
        std::vector<int64_t> next(count + 1);
        for (int64_t i = 0; i < pairs; ++i) {
            TORCH_CHECK_INDEX(ids[i] >= 0 && ids[i] < count, "expert ", ids[i], " of ", count);
            ++next[ids[i] + 1];
        }
        for (int64_t e = 0; e < count; ++e) {
            if (next[e + 1]) experts.push_back(e), starts.push_back(next[e]);
            next[e + 1] += next[e];
        }
        starts.push_back(pairs);
        for (int64_t i = 0; i < pairs; ++i) {
            places[i] = int32_t(next[ids[i]]++);
            tokens[places[i]] = int32_t(i / top);
        }
    }
};

class KernelSet {
public:
    explicit KernelSet(const std::string& isa) : kernels_(kernels_for(isa)) {}

    // Bytes of 16 rows of K columns, packed in blocks.
    int64_t block_bytes(const std::string& kind, int64_t K) const {
        const Stored stored = stored_as(kind);
        TORCH_CHECK(stored != Stored::numbers && K > 0 && K % file_block(stored).columns == 0, "rows of ", K,
                    " columns are not whole blocks of ", kind);
        return kernels_.block_bytes(stored, K);
    }

    // `weight` is rows of numbers, or with `kind`, rows of blocks as in a file.
    void pack_into(const Tensor& packed, const Tensor& weight, int64_t row, int64_t stride, int64_t offset,
                   const std::string& kind) const {
        check_rows(weight, "weight");
        check_same_dtype(packed, weight);
        const Stored stored = stored_as(kind);
        const FileBlock block = stored == Stored::numbers ? FileBlock{1, 1} : file_block(stored);
        TORCH_CHECK(weight.size(1) % block.bytes == 0, "rows of ", weight.size(1), " bytes are not blocks of ", kind);
        const int64_t K = weight.size(1) / block.bytes * block.columns;
        check_packed(packed, K, kind);
        const int64_t room = packed.size(0) / stride * kLanes;
        TORCH_CHECK(row >= 0 && row + weight.size(0) <= room, "rows ", row, " to ", row + weight.size(0),
                    " do not fit a packed weight of ", room);
        PackArgs args{packed.data_ptr(), weight.data_ptr(), weight.stride(0), weight.size(0), K, row, nullptr, stride,
                      offset, stored == Stored::numbers ? dtype_of(packed) : Dtype::f32, stored};
        pybind11::gil_scoped_release unlocked;
        kernels_.pack(runtime(), args);
    }

    Tensor unpack_rows(const Tensor& packed, const Tensor& ids, int64_t K, int64_t stride, int64_t offset,
                       at::ScalarType type, const std::string& kind) const {
        check_packed(packed, K, kind);
        const Stored stored = stored_as(kind);
        TORCH_CHECK(stored == Stored::numbers ? type == packed.scalar_type() : type == at::kFloat || type == at::kBFloat16,
                    "cannot read rows as ", type);
        const auto* id = contiguous_data<int64_t>(ids, at::kLong, ids.numel(), "ids");
        const int64_t room = packed.size(0) / stride * kLanes;
        for (int64_t i = 0; i < ids.numel(); ++i)
            TORCH_CHECK_INDEX(id[i] >= 0 && id[i] < room, "row ", id[i], " of a packed weight of ", room, " rows");
        Tensor out = at::empty({ids.numel(), K}, packed.options().dtype(type));
        kernels_.unpack(runtime(), {packed.data_ptr(), out.data_ptr(), K, ids.numel(), K, 0, id, stride, offset,
                                    dtype_of(out), stored});
        return out;
    }

    // The product with a matrix whose rows are stored in several ways; the outputs of the parts are adjacent.
    Tensor linear_parts(const Tensor& x, const std::vector<Part>& parts, const MaybeTensor& bias,
                        std::optional<at::ScalarType> out_dtype) const {
        int64_t N = 0;
        for (const auto& part : parts) N += std::get<1>(part);
        const at::ScalarType type = out_dtype.value_or(x.scalar_type());
        Tensor result = at::empty({x.size(0), N}, x.options().dtype(type));
        const char* biases = static_cast<const char*>(optional_data(bias, x, N, "bias"));
        char* out = static_cast<char*>(result.data_ptr());
        std::vector<LinearArgs> products;
        for (const auto& [packed, rows, kind] : parts) {
            products.push_back(product_args(x, packed, rows, kind, {Gate::none, 0, 0}, type));
            products.back().bias = biases, products.back().out = out, products.back().out_stride = N;
            out += rows * int64_t(c10::elementSize(type));
            if (biases) biases += rows * x.element_size();
        }
        multiply(products, x);
        return result;
    }

    // `silu(gate) * up` or the like, of gate and up in blocks.
    Tensor linear_gated_blocks(const Tensor& x, const Tensor& packed, int64_t N, const std::string& kind, bool gelu,
                               const MaybeTensor& bias) const {
        Tensor result = at::empty({x.size(0), N}, x.options());
        std::vector<LinearArgs> products{
            product_args(x, packed, N, kind, {gelu ? Gate::gelu : Gate::silu, 0, 0}, x.scalar_type())};
        products[0].bias = optional_data(bias, x, 2 * N, "bias"), products[0].out = result.data_ptr();
        multiply(products, x);
        return result;
    }

    Tensor linear(const Tensor& x, const Tensor& packed, int64_t N, const MaybeTensor& bias,
                  std::optional<at::ScalarType> out_dtype, const MaybeTensor& out) const {
        return product(x, packed, N, bias, out_dtype.value_or(x.scalar_type()), out, {Gate::none, 0, 0});
    }

    Tensor linear_silu_mul(const Tensor& x, const Tensor& packed, int64_t N, const MaybeTensor& bias,
                           const MaybeTensor& out) const {
        return product(x, packed, N, bias, x.scalar_type(), out, {Gate::silu, 0, 0});
    }

    Tensor linear_gelu_mul(const Tensor& x, const Tensor& packed, int64_t N, const MaybeTensor& bias,
                           const MaybeTensor& out) const {
        return product(x, packed, N, bias, x.scalar_type(), out, {Gate::gelu, 0, 0});
    }

    std::tuple<Tensor, Tensor> route(const Tensor& logits, int64_t top, bool sigmoid, bool normalised, double scale,
                                     int64_t groups, int64_t top_groups, const MaybeTensor& bias) const {
        const int64_t tokens = logits.size(0), experts = logits.size(1);
        TORCH_CHECK(groups > 0 && experts % groups == 0 && top_groups > 0 && top_groups <= groups && top > 0 &&
                        top <= experts / groups * top_groups,
                    top, " of ", experts, " experts in ", top_groups, " of ", groups, " groups cannot be chosen");
        Tensor ids = at::empty({tokens, top}, logits.options().dtype(at::kInt));
        Tensor weights = at::empty({tokens, top}, logits.options());
        Tensor scratch = at::empty({tokens, 3, experts}, logits.options());
        RouteArgs args{contiguous_data<float>(logits, at::kFloat, logits.numel(), "logits"),
                       bias ? contiguous_data<float>(*bias, at::kFloat, experts, "bias") : nullptr,
                       ids.mutable_data_ptr<int32_t>(), weights.mutable_data_ptr<float>(),
                       scratch.mutable_data_ptr<float>(), tokens, experts, top, groups, top_groups, sigmoid, normalised,
                       float(scale)};
        kernels_.route(runtime(), args);
        return {ids, weights};
    }

    // `gate_up` and `down` are stacks of packed weights, one per expert.
    Tensor experts(const Tensor& x, const Tensor& gate_up, const Tensor& down, int64_t width, const Tensor& ids,
                   const Tensor& weights, const MaybeTensor& gate_up_bias, const MaybeTensor& down_bias,
                   std::optional<std::tuple<double, double>> clamped, const std::string& gate_up_kind,
                   const std::string& down_kind) const {
        check_rows(x, "x");
        TORCH_CHECK(ids.dim() == 2 && ids.size(0) == x.size(0), "ids must be [rows of x, experts per row]");
        const int64_t hidden = x.size(1), pairs = ids.numel(), top = ids.size(1), count = down.size(0);
        check_stack(gate_up, x, count, 2 * ((width + kLanes - 1) / kLanes), hidden, gate_up_kind);
        check_stack(down, x, count, (hidden + kLanes - 1) / kLanes, width, down_kind);
        const Stored first = stored_as(gate_up_kind), second = stored_as(down_kind);
        const auto* id = contiguous_data<int32_t>(ids, at::kInt, pairs, "ids");
        const auto* weight = contiguous_data<float>(weights, at::kFloat, pairs, "weights");
        const Gating gating = clamped ? Gating{Gate::clamped, float(std::get<0>(*clamped)), float(std::get<1>(*clamped))}
                                      : Gating{Gate::silu, 0, 0};
        const PairsByExpert grouped(id, pairs, top, count);
        Tensor inner = at::empty({pairs, width}, x.options()), outer = at::empty({pairs, hidden}, x.options());
        Tensor out = at::empty({x.size(0), hidden}, x.options());
        const void* first_bias = optional_data(gate_up_bias, x, count * 2 * width, "the bias of gate and up");
        const void* second_bias = optional_data(down_bias, x, count * hidden, "the bias of down");
        pybind11::gil_scoped_release unlocked;
        multiply_by_expert(grouped, x, grouped.tokens.data(), gate_up, first, first_bias, inner, gating);
        multiply_by_expert(grouped, inner, nullptr, down, second, second_bias, outer, {Gate::none, 0, 0});
        kernels_.combine(runtime(), {outer.data_ptr(), grouped.places.data(), weight, out.data_ptr(), x.size(0), top,
                                     hidden, dtype_of(x)});
        return out;
    }

    Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, const MaybeTensor& out) const {
        return norm(x, nullptr, weight, eps, out);
    }

    Tensor add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
                        const MaybeTensor& out) const {
        TORCH_CHECK(residual.sizes() == x.sizes(), "residual and x differ in shape");
        return norm(x, contiguous_data<void>(residual, x.scalar_type(), x.numel(), "residual"), weight, eps, out);
    }

    void rope_and_write(const Tensor& qkv, const Tensor& positions, const Tensor& cos, const Tensor& sin,
                        const MaybeTensor& q_weight, const MaybeTensor& k_weight, double eps, const Tensor& k_cache,
                        const Tensor& v_cache, const Tensor& slots, int64_t H, int64_t HK, int64_t D) const {
        check_rows(qkv, "qkv");
        check_same_dtype(qkv, k_cache);
        const KvCache cache = cache_of(k_cache, v_cache, D);
        const int64_t T = qkv.size(0), rotary = cos.size(1);
        TORCH_CHECK(cache.kv_heads == HK && qkv.size(1) == (H + 2 * HK) * D, "qkv and cache differ in heads");
        TORCH_CHECK(rotary <= D && rotary % 2 == 0, "cos has ", rotary, " columns for heads of ", D);
        const Tensor wide = positions.scalar_type() == at::kInt ? positions.to(at::kLong) : positions;
        RopeArgs args{qkv.data_ptr(), qkv.stride(0), T, H,
                      contiguous_data<int64_t>(wide, at::kLong, T, "positions"),
                      contiguous_data<int64_t>(slots, at::kLong, T, "slots"),
                      contiguous_data<float>(cos, at::kFloat, cos.numel(), "cos"),
                      contiguous_data<float>(sin, at::kFloat, cos.numel(), "sin"), rotary,
                      optional_weight(q_weight, qkv, D, "q_weight"), optional_weight(k_weight, qkv, D, "k_weight"),
                      float(eps), cache, dtype_of(qkv), q_weight && is_wide(*q_weight, qkv)};
        TORCH_CHECK(!q_weight == !k_weight && (!q_weight || q_weight->scalar_type() == k_weight->scalar_type()),
                    "q_weight and k_weight differ in dtype, or one is missing");
        check_slots(args.slots, T, k_cache.size(0) * cache.block_size);
        for (int64_t t = 0; t < T; ++t)
            TORCH_CHECK_INDEX(args.positions[t] >= 0 && args.positions[t] < cos.size(0), "position ",
                              args.positions[t], " of ", cos.size(0));
        kernels_.rope_and_write(runtime(), args);
    }

    std::tuple<Tensor, Tensor> read_kv(const Tensor& k_cache, const Tensor& v_cache, const Tensor& slots,
                                       int64_t D) const {
        Tensor k = at::empty({slots.numel(), k_cache.size(1), D}, k_cache.options()), v = at::empty_like(k);
        copy_kv(k_cache, v_cache, slots, k, v, false);
        return {k, v};
    }

    void write_kv(const Tensor& k_cache, const Tensor& v_cache, const Tensor& slots, const Tensor& k,
                  const Tensor& v) const {
        copy_kv(k_cache, v_cache, slots, k, v, true);
    }

    Tensor attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& query_starts,
                     const Tensor& context_lens, const Tensor& block_tables, double scale, int64_t window, double cap,
                     const MaybeTensor& sinks, const MaybeTensor& out) const {
        TORCH_CHECK(q.dim() == 3 && q.stride(2) == 1 && q.stride(1) == q.size(2), "q must be [T, H, D], heads contiguous");
        check_same_dtype(q, k_cache);
        const int64_t S = context_lens.numel();
        const KvCache cache = cache_of(k_cache, v_cache, q.size(2));
        TORCH_CHECK(q.size(1) % cache.kv_heads == 0, q.size(1), " query heads over ", cache.kv_heads, " KV heads");
        TORCH_CHECK(block_tables.dim() == 2 && block_tables.size(0) == S, "block_tables must be [S, W]");
        Tensor result = output(out, q.sizes(), q, q.scalar_type());
        AttentionArgs args{q.data_ptr(), q.stride(0), result.data_ptr(), q.size(1), cache,
                           contiguous_data<int32_t>(query_starts, at::kInt, S + 1, "query_starts"),
                           contiguous_data<int32_t>(context_lens, at::kInt, S, "context_lens"),
                           contiguous_data<int32_t>(block_tables, at::kInt, block_tables.numel(), "block_tables"),
                           S, block_tables.size(1), float(scale), window, float(cap),
                           sinks ? contiguous_data<float>(*sinks, at::kFloat, q.size(1), "sinks") : nullptr,
                           dtype_of(q)};
        check_sequences(args, q.size(0));
        pybind11::gil_scoped_release unlocked;
        kernels_.attention(runtime(), args);
        return result;
    }

    Tensor sample(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
                  const Tensor& min_p, const Tensor& keys) const {
        check_logits(logits);
        const int64_t S = logits.size(0);
        Tensor out = at::empty({S}, logits.options().dtype(at::kLong));
        SampleArgs args{logits.const_data_ptr<float>(), logits.stride(0), S, logits.size(1),
                        contiguous_data<float>(temperature, at::kFloat, S, "temperature"),
                        contiguous_data<float>(top_p, at::kFloat, S, "top_p"),
                        contiguous_data<float>(min_p, at::kFloat, S, "min_p"),
                        contiguous_data<int32_t>(top_k, at::kInt, S, "top_k"),
                        contiguous_data<int64_t>(keys, at::kLong, S, "keys"), out.mutable_data_ptr<int64_t>()};
        pybind11::gil_scoped_release unlocked;
        kernels_.sample(runtime(), args);
        return out;
    }

    std::tuple<Tensor, Tensor> log_softmax_stats(const Tensor& logits) const {
        check_logits(logits);
        Tensor maximum = at::empty({logits.size(0)}, logits.options()), lse = at::empty_like(maximum);
        kernels_.log_softmax_stats(runtime(), {logits.const_data_ptr<float>(), logits.stride(0), logits.size(0),
                                               logits.size(1), maximum.mutable_data_ptr<float>(),
                                               lse.mutable_data_ptr<float>()});
        return {maximum, lse};
    }

    void probe_read(const Tensor& t) const { kernels_.probe_read(runtime(), t.data_ptr(), int64_t(t.nbytes())); }

    int64_t probe_multiply(at::ScalarType type, int64_t steps) const {
        return kernels_.probe_multiply(runtime(), type == at::kBFloat16 ? Dtype::bf16 : Dtype::f32, steps);
    }

private:
    Kernels kernels_;

    void check_packed(const Tensor& packed, int64_t K, const std::string& kind) const {
        if (kind.empty()) return check_packed(packed, K);
        TORCH_CHECK(packed.scalar_type() == at::kByte && packed.is_contiguous() && packed.dim() == 2 &&
                        packed.size(1) == block_bytes(kind, K),
                    "not a packed weight with ", K, " columns of ", kind, ": ", packed.sizes());
    }

    static void check_packed(const Tensor& packed, int64_t K) {
        const bool bf16 = dtype_of(packed) == Dtype::bf16;
        TORCH_CHECK(packed.is_contiguous() && packed.dim() == (bf16 ? 5 : 3) &&
                        packed.size(1) == (bf16 ? (K + 31) / 32 : K),
                    "not a packed weight with ", K, " columns: ", packed.sizes());
    }

    void check_stack(const Tensor& stack, const Tensor& x, int64_t count, int64_t blocks, int64_t K,
                     const std::string& kind) const {
        if (!kind.empty()) {
            TORCH_CHECK(stack.scalar_type() == at::kByte && stack.is_contiguous() && stack.dim() == 3 &&
                            stack.size(0) == count && stack.size(1) == blocks && stack.size(2) == block_bytes(kind, K),
                        "not packed weights of ", count, " experts with ", K, " columns of ", kind, ": ", stack.sizes());
            return;
        }
        check_same_dtype(x, stack);
        TORCH_CHECK(stack.dim() > 1 && stack.is_contiguous() && stack.size(0) == count, "not packed weights of ", count,
                    " experts: ", stack.sizes());
        const bool bf16 = dtype_of(stack) == Dtype::bf16;
        TORCH_CHECK(stack.dim() == (bf16 ? 6 : 4) && stack.size(1) == blocks && stack.size(2) == (bf16 ? (K + 31) / 32 : K),
                    "not packed weights with ", blocks, " blocks and ", K, " columns: ", stack.sizes());
    }

    // One product per expert: its rows of `x` with its weight, to its places in `out`.
    void multiply_by_expert(const PairsByExpert& grouped, const Tensor& x, const int32_t* rows, const Tensor& stack,
                            Stored stored, const void* bias, const Tensor& out, Gating gating) const {
        const int64_t K = x.size(1), N = out.size(1), used = int64_t(grouped.experts.size());
        const int64_t item = x.element_size(), biases = gating.gate == Gate::none ? N : 2 * N;
        std::vector<LinearArgs> products;
        std::vector<int64_t> offsets;
        int64_t bytes = 0;
        for (int64_t i = 0; i < used; ++i) {
            const int64_t start = grouped.starts[i], M = grouped.starts[i + 1] - start, expert = grouped.experts[i];
            products.push_back({x.data_ptr(), x.stride(0), rows ? rows + start : nullptr,
                                static_cast<const char*>(stack.data_ptr()) + expert * stack.stride(0) * stack.element_size(),
                                stored, bias ? static_cast<const char*>(bias) + expert * biases * item : nullptr,
                                static_cast<char*>(out.data_ptr()) + start * N * item, N, M, N, K, dtype_of(x), dtype_of(x),
                                gating, nullptr});
            if (!rows) products.back().x = static_cast<const char*>(x.data_ptr()) + start * x.stride(0) * item;
            offsets.push_back(bytes);
            bytes += kernels_.linear_scratch_bytes(M, K);
        }
        Tensor scratch = at::empty({bytes}, x.options().dtype(at::kByte));
        for (int64_t i = 0; i < used; ++i) products[i].scratch = static_cast<char*>(scratch.data_ptr()) + offsets[i];
        kernels_.linear(runtime(), products.data(), used);
    }

    static void check_slots(const int64_t* slots, int64_t count, int64_t room) {
        for (int64_t i = 0; i < count; ++i)
            TORCH_CHECK_INDEX(slots[i] < room, "slot ", slots[i], " of a cache of ", room);
    }

    static void check_logits(const Tensor& logits) {
        check_rows(logits, "logits");
        TORCH_CHECK(logits.scalar_type() == at::kFloat && logits.size(1) > 0, "logits must be float32 [S, V]");
    }

    // A wrong number here would read out of bounds, and this is only a few hundred integers.
    static void check_sequences(const AttentionArgs& args, int64_t tokens) {
        const auto* starts = args.query_starts;
        TORCH_CHECK(starts[0] == 0 && starts[args.sequences] == tokens, "query_starts must run from 0 to ", tokens);
        for (int64_t s = 0; s < args.sequences; ++s) {
            TORCH_CHECK(starts[s] <= starts[s + 1] && starts[s + 1] - starts[s] <= args.context_lens[s],
                        "sequence ", s, " has more query tokens than context");
            TORCH_CHECK(args.context_lens[s] <= args.table_stride * args.cache.block_size, "sequence ", s, " has ",
                        args.context_lens[s], " tokens in ", args.table_stride, " blocks");
        }
    }

    // One product; bias, out and scratch are filled in by the caller.
    LinearArgs product_args(const Tensor& x, const Tensor& packed, int64_t N, const std::string& kind, Gating gating,
                            at::ScalarType out_dtype) const {
        check_rows(x, "x");
        if (kind.empty()) check_same_dtype(x, packed);
        const int64_t M = x.size(0), K = x.size(1), take = gating.gate == Gate::none ? 1 : 2;
        check_packed(packed, K, kind);
        TORCH_CHECK(packed.size(0) == take * ((N + kLanes - 1) / kLanes), "packed weight does not have ", N, " rows");
        TORCH_CHECK(out_dtype == at::kFloat || out_dtype == at::kBFloat16, "cannot give ", out_dtype);
        return {x.data_ptr(), x.stride(0), nullptr, packed.data_ptr(), stored_as(kind), nullptr, nullptr, N, M, N, K,
                dtype_of(x), out_dtype == at::kFloat ? Dtype::f32 : Dtype::bf16, gating, nullptr};
    }

    // Products of the same rows, each with scratch memory of its own.
    void multiply(std::vector<LinearArgs>& products, const Tensor& x) const {
        if (x.size(0) == 0 || products.empty()) return;
        const int64_t each = kernels_.linear_scratch_bytes(x.size(0), x.size(1));
        Tensor scratch = at::empty({each * int64_t(products.size())}, x.options().dtype(at::kByte));
        for (size_t i = 0; i < products.size(); ++i)
            products[i].scratch = static_cast<char*>(scratch.data_ptr()) + int64_t(i) * each;
        pybind11::gil_scoped_release unlocked;
        kernels_.linear(runtime(), products.data(), int64_t(products.size()));
    }

    Tensor product(const Tensor& x, const Tensor& packed, int64_t N, const MaybeTensor& bias, at::ScalarType out_dtype,
                   const MaybeTensor& out, Gating gating) const {
        std::vector<LinearArgs> products{product_args(x, packed, N, "", gating, out_dtype)};
        Tensor result = output(out, {x.size(0), N}, x, out_dtype);
        products[0].bias = optional_data(bias, x, gating.gate == Gate::none ? N : 2 * N, "bias");
        products[0].out = result.data_ptr();
        multiply(products, x);
        return result;
    }

    Tensor norm(const Tensor& x, void* residual, const Tensor& weight, double eps, const MaybeTensor& out) const {
        check_rows(x, "x");
        const int64_t rows = x.size(0), K = x.size(1);
        Tensor result = output(out, x.sizes(), x, x.scalar_type());
        kernels_.rms_norm(runtime(), {x.data_ptr(), x.stride(0), residual,
                                      weight_data(weight, x, K, "weight"), result.data_ptr(), rows, K, float(eps),
                                      dtype_of(x), is_wide(weight, x)});
        return result;
    }

    void copy_kv(const Tensor& k_cache, const Tensor& v_cache, const Tensor& slots, const Tensor& k, const Tensor& v,
                 bool to_cache) const {
        TORCH_CHECK(k.dim() == 3 && k.size(1) == k_cache.size(1), "k and v must be [tokens, KV heads, head size]");
        const KvCache cache = cache_of(k_cache, v_cache, k.size(2));
        const int64_t T = slots.numel(), numel = T * cache.kv_heads * cache.head_size;
        const auto* slot = contiguous_data<int64_t>(slots, at::kLong, T, "slots");
        check_slots(slot, T, k_cache.size(0) * cache.block_size);
        for (int64_t i = 0; i < T; ++i) TORCH_CHECK_INDEX(slot[i] >= 0, "slot ", slot[i]);
        kernels_.copy_kv(runtime(), {cache, slot, T, contiguous_data<void>(k, k_cache.scalar_type(), numel, "k"),
                                     contiguous_data<void>(v, k_cache.scalar_type(), numel, "v"), to_cache,
                                     dtype_of(k_cache)});
    }
};

}  // namespace

PYBIND11_MODULE(HEADGATE_MODULE, m) {
    namespace py = pybind11;
    m.def("supported_isas", supported_isas);
    m.def("large_zeros", large_zeros);
    py::class_<KernelSet>(m, "KernelSet")
        .def(py::init<const std::string&>())
        .def("pack_into", &KernelSet::pack_into)
        .def("unpack_rows", &KernelSet::unpack_rows)
        .def("block_bytes", &KernelSet::block_bytes)
        .def("linear", &KernelSet::linear)
        .def("linear_parts", &KernelSet::linear_parts)
        .def("linear_gated_blocks", &KernelSet::linear_gated_blocks)
        .def("linear_silu_mul", &KernelSet::linear_silu_mul)
        .def("linear_gelu_mul", &KernelSet::linear_gelu_mul)
        .def("route", &KernelSet::route)
        .def("experts", &KernelSet::experts)
        .def("rms_norm", &KernelSet::rms_norm)
        .def("add_rms_norm", &KernelSet::add_rms_norm)
        .def("rope_and_write", &KernelSet::rope_and_write)
        .def("read_kv", &KernelSet::read_kv)
        .def("write_kv", &KernelSet::write_kv)
        .def("attention", &KernelSet::attention)
        .def("sample", &KernelSet::sample)
        .def("log_softmax_stats", &KernelSet::log_softmax_stats)
        .def("probe_read", &KernelSet::probe_read)
        .def("probe_multiply", &KernelSet::probe_multiply);
}

}  // namespace headgate
