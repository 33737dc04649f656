#include "server/device/worker_team.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <latch>
#include <semaphore>
#include <thread>
#include <vector>

namespace ballast {
namespace {

TEST(WorkerTeamTest, EachPartIsDoneOnce) {
  WorkerTeam team(3, "test");
  for (uint64_t parts = 0; parts < 200; ++parts) {
    std::vector<std::atomic<int>> done(parts);
    team.Share(parts, [&](uint64_t part) { ++done[part]; });
    EXPECT_TRUE(std::ranges::all_of(done, [](const std::atomic<int>& n) { return n == 1; })) << parts << " parts";
  }
}

TEST(WorkerTeamTest, AsManyPartsAsThereAreThreadsAreDoneAtOnce) {
  WorkerTeam team(4, "test");
  EXPECT_EQ(team.threads(), 4u);
  std::latch all(4);
  team.Share(4, [&](uint64_t) { all.arrive_and_wait(); });  // none ends before the last has begun
}

TEST(WorkerTeamTest, ATeamOfOneIsTheCaller) {
  for (const uint32_t threads : {0u, 1u}) {
    WorkerTeam team(threads, "test");
    EXPECT_EQ(team.threads(), 1u);
    EXPECT_TRUE(team.workers().empty());
    const auto caller = std::this_thread::get_id();
    int here = 0;
    team.Share(5, [&](uint64_t) { here += std::this_thread::get_id() == caller ? 1 : 0; });
    EXPECT_EQ(here, 5);
  }
}

TEST(WorkerTeamTest, WhatWorkersWroteIsSeenByTheCaller) {
  WorkerTeam team(2, "test");
  std::vector<uint64_t> written(1000);
  for (uint64_t round = 1; round <= 100; ++round) {
    team.Share(written.size(), [&](uint64_t part) { written[part] = round * part; });
    for (uint64_t i = 0; i < written.size(); ++i) ASSERT_EQ(written[i], round * i);
  }
}

// Where a processor is busy with other threads, say.
class StuckWorker {
 public:
  explicit StuckWorker(std::thread* worker) {
    struct sigaction action {};
    action.sa_handler = [](int) {
      begun_.release();
      const auto patience = std::chrono::minutes(1);
      was_freed_ = free_.try_acquire_for(patience);
      gone_.release();
    };
    sigaction(SIGUSR1, &action, &before_);
    pthread_kill(worker->native_handle(), SIGUSR1);
    begun_.acquire();
  }
  ~StuckWorker() { sigaction(SIGUSR1, &before_, nullptr); }
  // Whether it was stuck until now.
  static bool Free() {
    free_.release();
    gone_.acquire();
    return was_freed_;
  }

 private:
  static inline std::binary_semaphore begun_{0}, free_{0}, gone_{0};
  static inline std::atomic<bool> was_freed_ = false;
  struct sigaction before_ {};
};

TEST(WorkerTeamTest, NobodyWaitsForAWorkerThatHasNotBegun) {
  WorkerTeam team(2, "test");
  int done = 0;
  {
    const StuckWorker worker(&team.workers()[0]);
    for (int round = 0; round < 3; ++round) team.Share(4, [&](uint64_t) { ++done; });
    EXPECT_TRUE(worker.Free());
  }
  EXPECT_EQ(done, 12);
  std::latch both(2);
  team.Share(2, [&](uint64_t) { both.arrive_and_wait(); });  // it is there again
}

}  // namespace
}  // namespace ballast
