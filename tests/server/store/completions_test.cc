#include "server/store/completions.h"

#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"

namespace ballast {
namespace {

TaskResult Took(double seconds) { return {.seconds = seconds}; }

TEST(CompletionsTest, AnswersThatComeTogetherTakeOneTurnInTheirOrder) {
  absl::Notification began, go_on;
  std::vector<double> heard, when_posted;
  {
    Strand strand({.name = "t"});
    Completions completions(&strand);
    strand.Post([&] {
      began.Notify();
      go_on.WaitForNotification();
    });
    began.WaitForNotification();
    for (int i = 0; i < 100; ++i) {
      completions.OnStrand([&](const TaskResult& r) { heard.push_back(r.seconds); })(Took(i));
      if (i == 0) strand.Post([&] { when_posted = heard; });
    }
    go_on.Notify();
  }
  ASSERT_EQ(heard.size(), 100u);
  for (size_t i = 0; i < heard.size(); ++i) EXPECT_EQ(heard[i], static_cast<double>(i));
  EXPECT_EQ(when_posted, heard) << "the first answer's turn was that of all";
}

TEST(CompletionsTest, WhatAnAnswerLeadsToIsHeardInALaterTurn) {
  int heard = 0;
  {
    Strand strand({.name = "t"});
    Completions completions(&strand);
    absl::Notification last;
    completions.OnStrand([&](const TaskResult&) {
      ++heard;
      completions.OnStrand([&](const TaskResult&) {
        ++heard;
        last.Notify();
      })({});
      EXPECT_EQ(heard, 1);
    })({});
    last.WaitForNotification();
  }
  EXPECT_EQ(heard, 2);
}

TEST(CompletionsTest, OneIsAwaitedUntilItHasRunOrIsDropped) {
  Strand strand({.name = "t"});
  Completions completions(&strand);
  EXPECT_FALSE(completions.awaited());
  auto held = std::make_shared<int>();
  bool awaited_meanwhile = false;
  auto dropped = completions.OnStrand([held](const TaskResult&) {});
  auto run = completions.OnStrand([&](const TaskResult&) { awaited_meanwhile = completions.awaited(); });
  dropped = nullptr;
  EXPECT_EQ(held.use_count(), 1);
  EXPECT_TRUE(completions.awaited());
  run({});
  run = nullptr;
  strand.Stop();
  EXPECT_TRUE(awaited_meanwhile);
  EXPECT_FALSE(completions.awaited());
  completions.Post([&] { awaited_meanwhile = false; });
  EXPECT_FALSE(awaited_meanwhile);
}

TEST(CompletionsTest, AnswersMayOutliveIt) {
  int heard = 0;
  DeviceQueue::Completion late;
  Strand strand({.name = "t"});
  {
    Completions completions(&strand);
    late = completions.OnStrand([&](const TaskResult&) { ++heard; });
  }
  late({});
  strand.Stop();
  EXPECT_EQ(heard, 1);
}

TEST(CompletionsTest, SeveralDevicesAnswerAtOnce) {
  constexpr int kThreads = 4, kAnswers = 2000;
  std::vector<std::vector<double>> heard(kThreads);
  {
    Strand strand({.name = "t"});
    Completions completions(&strand);
    std::vector<std::thread> devices;
    for (int d = 0; d < kThreads; ++d) {
      devices.emplace_back([&, d] {
        for (int i = 0; i < kAnswers; ++i) {
          completions.OnStrand(
              [&heard, d](const TaskResult& r) { heard[static_cast<size_t>(d)].push_back(r.seconds); })(Took(i));
        }
      });
    }
    for (std::thread& device : devices) device.join();
  }
  for (const std::vector<double>& of_device : heard) {
    ASSERT_EQ(of_device.size(), static_cast<size_t>(kAnswers));
    for (size_t i = 0; i < of_device.size(); ++i) ASSERT_EQ(of_device[i], static_cast<double>(i));
  }
}

}  // namespace
}  // namespace ballast
