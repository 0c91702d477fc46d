// The threads that help with a kernel, and a promise: the caller never waits for a helper that has not come.
//
// A barrier that expects every thread stalls for a whole time slice whenever another process holds a core. Here a
// kernel is an open job that helpers may join while it lasts. The caller works on it like everyone else, closes it when
// nothing is left to take, and waits only for helpers that are inside, each of them in its last run of units.
//
// One word says it all: the job's generation, whether it is open, and how many helpers are inside.
#pragma once

#include <immintrin.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace headgate {

class Crew {
public:
    // The crew outlives main(): helpers may be asleep in it when the process exits.
    static Crew& get() {
        static Crew* crew = new Crew;
        return *crew;
    }

    void run(int threads, void (*body)(void*), void* argument) {
        // One job at a time; a second caller (another engine in this process) does its work alone.
        std::unique_lock<std::mutex> mine(job_mutex_, std::try_to_lock);
        if (!mine || threads <= 1) return body(argument);
        hire(threads - 1);
        body_ = body;
        argument_ = argument;
        const uint64_t generation = (word_.load(std::memory_order_relaxed) >> kGenerationShift) + 1;
        word_.store(generation << kGenerationShift | kOpen, std::memory_order_release);
        wake_sleepers();
        body(argument);
        word_.fetch_and(~kOpen, std::memory_order_acq_rel);
        while (word_.load(std::memory_order_acquire) & kInside) _mm_pause();
    }

private:
    static constexpr int kGenerationShift = 32;
    static constexpr uint64_t kOpen = uint64_t(1) << 31;
    static constexpr uint64_t kInside = kOpen - 1;
    // Kernels of a step follow each other within microseconds; a helper that slept between them would come too late.
    static constexpr int kSpins = 4000;

    void hire(int helpers) {
        for (; hired_ < helpers; ++hired_) std::thread([this] { help(); }).detach();
    }

    void help() {
        uint64_t done = 0;  // the generation we last worked on
        for (;;) {
            const uint64_t word = await(done);
            done = word >> kGenerationShift;
            if (!enter(word)) continue;
            body_(argument_);
            word_.fetch_sub(1, std::memory_order_acq_rel);
        }
    }

    bool enter(uint64_t word) {
        const uint64_t generation = word >> kGenerationShift;
        while ((word & kOpen) && word >> kGenerationShift == generation)
            if (word_.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel)) return true;
        return false;
    }

    // An open job that is not `done`: first by looking often, then asleep.
    uint64_t await(uint64_t done) {
        for (int i = 0; i < kSpins; ++i, _mm_pause())
            if (const uint64_t word = word_.load(std::memory_order_acquire); fresh(word, done)) return word;
        std::unique_lock<std::mutex> lock(sleep_mutex_);
        ++sleepers_;
        uint64_t word = 0;
        bell_.wait(lock, [&] { return fresh(word = word_.load(std::memory_order_acquire), done); });
        --sleepers_;
        return word;
    }

    static bool fresh(uint64_t word, uint64_t done) { return (word & kOpen) && word >> kGenerationShift != done; }

    void wake_sleepers() {
        // A helper that is about to sleep checks the word under the lock, so none sleeps through a job it could take.
        std::lock_guard<std::mutex> lock(sleep_mutex_);
        if (sleepers_) bell_.notify_all();
    }

    std::mutex job_mutex_, sleep_mutex_;
    std::condition_variable bell_;
    int hired_ = 0, sleepers_ = 0;
    std::atomic<uint64_t> word_{0};
    void (*body_)(void*) = nullptr;
    void* argument_ = nullptr;
};

}  // namespace headgate
