#include "server/device/fair_queue.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

namespace ballast {
namespace {

// A device that does one job at a time, when it is told.
class FairQueueTest : public ::testing::Test {
 protected:
  struct Queue : FairQueue {
    explicit Queue(std::string n) : name(std::move(n)) {}
    std::string name;
    bool running = false;
  };

  void Add(Queue* q, uint64_t cost_bytes) {
    q->Add({.cost_bytes = cost_bytes}, q->jobs.empty() && !q->running, clock_);
  }
  // The next job is taken, and done when the one after it is.
  Queue* Serve() {
    Queue* const next = NextFairQueue(queues_, [](const Queue&) { return true; });
    if (running_ != nullptr) running_->running = false;
    running_ = next;
    if (next == nullptr) return nullptr;
    next->running = true;
    served_[next->name] += next->Take(&clock_).cost_bytes;
    return next;
  }

  Queue a_{"a"}, b_{"b"}, c_{"c"};
  const std::vector<Queue*> queues_ = {&a_, &b_, &c_};
  Queue* running_ = nullptr;
  FairClock clock_ = 0;
  std::map<std::string, uint64_t> served_;
};

TEST_F(FairQueueTest, QueuesWithJobsShareEqually) {
  for (int i = 0; i < 300; ++i) {
    Add(&a_, 10);
    Add(&b_, 30);
    if (i % 3 == 0) Add(&c_, 90);
  }
  for (int i = 0; i < 300; ++i) Serve();
  EXPECT_NEAR(static_cast<double>(served_["a"]), static_cast<double>(served_["b"]), 100);
  EXPECT_NEAR(static_cast<double>(served_["a"]), static_cast<double>(served_["c"]), 100);
}

// Queue a never has a waiting job while one is at work, like a run that sends its updates one by one.
TEST_F(FairQueueTest, ALateQueueDoesNotCatchUp) {
  for (int i = 0; i < 1000; ++i) {
    Add(&a_, 1000);
    Serve();
  }
  for (int i = 0; i < 100; ++i) Add(&b_, 1000);
  served_.clear();
  for (int i = 0; i < 20; ++i) {
    if (a_.jobs.empty()) Add(&a_, 1000);
    Serve();
  }
  EXPECT_GE(served_["a"], 9000u);
  EXPECT_GE(served_["b"], 9000u);
}

TEST_F(FairQueueTest, AnIdleQueueNeitherCatchesUpNorPays) {
  Add(&b_, 1000);
  Serve();
  for (int i = 0; i < 1000; ++i) {
    Add(&a_, 1000);
    Serve();
  }
  Serve();  // none: all are idle
  for (int i = 0; i < 100; ++i) {
    Add(&b_, 1000);
    Add(&a_, 1000);
  }
  served_.clear();
  for (int i = 0; i < 20; ++i) Serve();
  EXPECT_EQ(served_["a"], 10000u);
  EXPECT_EQ(served_["b"], 10000u);
}

// Large jobs put the other queues' counts far apart; the small queue does not have to wait for the largest count.
TEST_F(FairQueueTest, ABriefQueueIsServedBesideLongOnes) {
  for (int i = 0; i < 100; ++i) {
    Add(&a_, 100000);
    Add(&b_, 30000);
  }
  int turns = 0, brief = 0;
  Add(&c_, 10);
  for (; turns < 60; ++turns) {
    if (Serve() == &c_) ++brief;
    if (c_.jobs.empty() && !c_.running) Add(&c_, 10);
  }
  EXPECT_GE(brief, turns / 3 - 1);
}

}  // namespace
}  // namespace ballast
