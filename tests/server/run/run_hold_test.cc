// A run that is held for another to take its place, and goes on as it was where none does.
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/notification.h"

#include "server/convert/convert.h"
#include "server/device/cpu_device.h"
#include "server/metrics/metrics.h"
#include "server/run/run.h"
#include "tests/server/specs.h"

namespace ballast {
namespace {

constexpr uint64_t kSession = 7;

class RunHoldTest : public ::testing::Test {
 protected:
  void SetUp() override {
    v1::RunSpec wire = testing::MakeSpec("r1", {{"w", {8, 8}, "fp32"}});
    wire.mutable_rewind()->set_snapshots(1);
    spec_ = ToRunSpec(wire, {}).value();
    run_ = ballast::Run::Create({.spec = spec_, .plan = MakePlan(spec_), .devices = {&device_}, .metrics = &metrics_})
               .value();
    const auto attached = Await<absl::StatusOr<ballast::Run::AttachReply>>([&](auto done) {
      run_->Attach({.fresh = SessionId{kSession}},
                   [done = std::move(done)](auto reply, double) mutable { done(std::move(reply)); });
    });
    ASSERT_TRUE(attached.ok()) << attached.status();
  }
  // What the call answers.
  template <typename Answer>
  static Answer Await(const std::function<void(absl::AnyInvocable<void(Answer)>)>& call) {
    absl::Notification answered;
    std::optional<Answer> answer;
    call([&](Answer given) {
      answer = std::move(given);
      answered.Notify();
    });
    answered.WaitForNotification();
    return *std::move(answer);
  }
  absl::Status Hold() {
    return Await<absl::Status>([&](auto done) { run_->Hold(SessionId{kSession}, std::move(done)); });
  }
  absl::Status BeginLoad(bool replaces) {
    const LoadCall call{.session = SessionId{kSession}, .number = ++calls_};
    return Await<absl::Status>([&](auto done) { run_->BeginLoad(call, replaces, std::move(done)); });
  }
  void Load() {
    ASSERT_TRUE(BeginLoad(false).ok());
    const LoadCall call{.session = SessionId{kSession}, .number = calls_};
    std::vector<LoadChunk> chunks(1);
    chunks[0] = {.format = kernels::FindWireFormat("fp32"), .data = std::string(64 * sizeof(float), '\0')};
    ASSERT_TRUE(Await<absl::Status>([&](auto done) { run_->Load(call, std::move(chunks), std::move(done)); }).ok());
    const auto digests =
        Await<absl::StatusOr<ballast::Run::Digests>>([&](auto done) { run_->FinishLoad(call, std::move(done)); });
    ASSERT_TRUE(digests.ok()) << digests.status();
  }
  absl::Status Rewind() {
    return Await<absl::StatusOr<Rewound>>([&](auto done) { run_->Rewind({}, std::move(done)); }).status();
  }

  CpuDevice device_{{.threads = 1}};
  Metrics metrics_{{}};
  RunSpec spec_;
  std::shared_ptr<ballast::Run> run_;
  uint64_t calls_ = 0;
};

TEST_F(RunHoldTest, WhatIsToBeTakenOverDoesNotChange) {
  EXPECT_TRUE(absl::IsFailedPrecondition(Hold())) << "there are no weights yet";
  Load();
  ASSERT_TRUE(Hold().ok());
  for (const absl::Status& refused : {Hold(), BeginLoad(false), BeginLoad(true), Rewind()}) {
    EXPECT_TRUE(absl::IsUnavailable(refused)) << refused;
    EXPECT_NE(refused.message().find("amended"), absl::string_view::npos) << refused;
  }
}

TEST_F(RunHoldTest, ARunThatIsReleasedGoesOn) {
  Load();
  ASSERT_TRUE(Hold().ok());
  run_->Release();
  EXPECT_TRUE(absl::IsFailedPrecondition(Rewind())) << "no snapshot is kept yet";
  EXPECT_TRUE(Hold().ok());
  run_->Release();
  Load();
}

// As of a call that is cancelled while planes are converted.
TEST_F(RunHoldTest, OneThatIsNoLongerWantedLeavesTheRunItsMetrics) {
  Load();
  ASSERT_TRUE(Hold().ok());
  const auto shown = [this] {
    std::vector<std::string> lines = absl::StrSplit(metrics_.Serialize(), '\n');
    std::erase_if(lines, [](const std::string& line) {
      return !absl::StartsWith(line, "ballast_run") || !absl::StrContains(line, "_state{");
    });
    return lines;
  };
  const std::vector<std::string> before = shown();
  ASSERT_FALSE(before.empty());
  const uint64_t allocated = device_.allocated_bytes();
  const auto made = ballast::Run::Create({.spec = spec_,
                                          .plan = MakePlan(spec_),
                                          .devices = {&device_},
                                          .metrics = &metrics_,
                                          .past = run_.get(),
                                          .still_wanted = [] { return absl::CancelledError("gone"); }});
  EXPECT_TRUE(absl::IsCancelled(made.status())) << made.status();
  EXPECT_EQ(shown(), before);
  EXPECT_EQ(device_.allocated_bytes(), allocated);
  run_->Release();
  EXPECT_TRUE(Hold().ok());
}

// A daemon that is stopped ends its runs: they are there again at the next one.
TEST_F(RunHoldTest, WhoComesAfterTheEndIsToldWhyItCame) {
  run_->End(absl::UnavailableError("the daemon is shutting down"));
  const auto attached = Await<absl::StatusOr<ballast::Run::AttachReply>>([&](auto done) {
    run_->Attach({.fresh = SessionId{kSession}},
                 [done = std::move(done)](auto reply, double) mutable { done(std::move(reply)); });
  });
  for (const absl::Status& refused : {attached.status(), Hold(), BeginLoad(false), Rewind()}) {
    EXPECT_EQ(refused, absl::UnavailableError("the daemon is shutting down"));
  }
}

TEST_F(RunHoldTest, ASessionThatIsOverHoldsNothing) {
  Load();
  const auto hold = [&](auto done) { run_->Hold(SessionId{kSession + 1}, std::move(done)); };
  EXPECT_FALSE(Await<absl::Status>(hold).ok());
  EXPECT_TRUE(Hold().ok());
}

}  // namespace
}  // namespace ballast
