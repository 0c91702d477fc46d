// Work sharing: threads take ever smaller runs of consecutive units until none is left.
//
// Guided rather than an even split, because on a shared machine a core often loses time to another process. Runs are
// consecutive so that a thread can prefetch what it will read next.
#pragma once

#include <atomic>

#include "simd.h"
#include "table.h"

namespace headgate {
namespace HEADGATE_ISA {

// Calls visit(first, last) on runs that cover 0 .. units exactly once.
template <class Visit> HG_INLINE void for_each_run(const Runtime& runtime, int64_t units, Visit visit) {
    if (units <= 0) return;
    if (runtime.threads <= 1 || units == 1) {
        visit(int64_t(0), units);
        return;
    }
    struct Shared {
        std::atomic<int64_t> next;
        int64_t units, threads;
        Visit* visit;
    } shared{{0}, units, runtime.threads, &visit};
    auto body = [](void* argument) {
        auto& work = *static_cast<Shared*>(argument);
        int64_t first = work.next.load(std::memory_order_relaxed);
        while (first < work.units) {
            int64_t run = max64(1, (work.units - first) / (2 * work.threads));
            if (!work.next.compare_exchange_weak(first, first + run, std::memory_order_relaxed)) continue;
            (*work.visit)(first, first + run);
            first = work.next.load(std::memory_order_relaxed);
        }
    };
    runtime.run_on_all(int(min64(runtime.threads, units)), body, &shared);
}

constexpr int64_t kWorthWaking = 1 << 15;  // elements

// The same, but on one thread if there is too little work to wake the others.
template <class Visit>
HG_INLINE void for_each_run_if_worth(const Runtime& runtime, int64_t units, int64_t elements, Visit visit) {
    if (elements < kWorthWaking) {
        if (units > 0) visit(int64_t(0), units);
    } else {
        for_each_run(runtime, units, visit);
    }
}

}  // namespace HEADGATE_ISA
}  // namespace headgate
