// The threads that help with a kernel. The caller never waits for a helper that has not started.
//
// A barrier that expects every thread stalls for a whole time slice whenever another process occupies a core. Here a
// kernel is an open job that helpers may join while it lasts. The caller works on it like the helpers, closes it when
// no work is left to take, and waits only for helpers that have joined, each of them in its last run of units.
//
// One atomic word holds the state: the job's generation, whether it is open, and the number of helpers inside.
#pragma once

#include <immintrin.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace headgate {

class ThreadTeam {
public:
    // Never destroyed: helpers may be asleep in it when the process exits.
    static ThreadTeam& get() {
        static ThreadTeam* team = new ThreadTeam;
        return *team;
    }

    void run(int threads, void (*body)(void*), void* argument) {
        // One job at a time; a second caller (another engine in this process) works without helpers.
        std::unique_lock<std::mutex> job_lock(job_mutex_, std::try_to_lock);
        if (!job_lock || threads <= 1) return body(argument);
        start_helpers(threads - 1);
        body_ = body;
        argument_ = argument;
        const uint64_t generation = (state_.load(std::memory_order_relaxed) >> kGenerationShift) + 1;
        state_.store(generation << kGenerationShift | kOpen, std::memory_order_release);
        wake_sleepers();
        body(argument);
        state_.fetch_and(~kOpen, std::memory_order_acq_rel);
        while (state_.load(std::memory_order_acquire) & kInside) _mm_pause();
    }

private:
    static constexpr int kGenerationShift = 32;
    static constexpr uint64_t kOpen = uint64_t(1) << 31;
    static constexpr uint64_t kInside = kOpen - 1;
    // Kernels of a step follow each other within microseconds; a helper that slept in between would be too late.
    static constexpr int kSpins = 4000;

    void start_helpers(int helpers) {
        for (; started_ < helpers; ++started_) std::thread([this] { help(); }).detach();
    }

    void help() {
        uint64_t done = 0;  // the generation of the last job
        for (;;) {
            const uint64_t state = await(done);
            done = state >> kGenerationShift;
            if (!enter(state)) continue;
            body_(argument_);
            state_.fetch_sub(1, std::memory_order_acq_rel);
        }
    }

    bool enter(uint64_t state) {
        const uint64_t generation = state >> kGenerationShift;
        while ((state & kOpen) && state >> kGenerationShift == generation)
            if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) return true;
        return false;
    }

    // Waits for an open job other than `done`: first spinning, then asleep.
    uint64_t await(uint64_t done) {
        for (int i = 0; i < kSpins; ++i, _mm_pause())
            if (const uint64_t state = state_.load(std::memory_order_acquire); is_new(state, done)) return state;
        std::unique_lock<std::mutex> lock(sleep_mutex_);
        ++sleepers_;
        uint64_t state = 0;
        wake_up_.wait(lock, [&] { return is_new(state = state_.load(std::memory_order_acquire), done); });
        --sleepers_;
        return state;
    }

    static bool is_new(uint64_t state, uint64_t done) { return (state & kOpen) && state >> kGenerationShift != done; }

    void wake_sleepers() {
        // A helper that is about to sleep checks the state under the lock, so it cannot miss a job.
        std::lock_guard<std::mutex> lock(sleep_mutex_);
        if (sleepers_) wake_up_.notify_all();
    }

    std::mutex job_mutex_, sleep_mutex_;
    std::condition_variable wake_up_;
    int started_ = 0, sleepers_ = 0;
    std::atomic<uint64_t> state_{0};
    void (*body_)(void*) = nullptr;
    void* argument_ = nullptr;
};

}  // namespace headgate
