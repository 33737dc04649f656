// Runs that take long to be made, beside others that come and go meanwhile.
#include "server/run/run_registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"

#include "server/convert/convert.h"
#include "server/device/cpu_device.h"
#include "tests/server/specs.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kSmall = 300, kLarge = 1 << 20;  // elements

// A CPU on which what is as large as a large run's planes is there when the gate opens, and no earlier.
class GatedDevice final : public Device {
 public:
  absl::StatusOr<DeviceBuffer> Allocate(uint64_t bytes, Place place) override {
    if (bytes >= kLarge) {
      if (!reached_.HasBeenNotified()) reached_.Notify();
      gate_.WaitForNotification();
    }
    return cpu_.Allocate(bytes, place);
  }
  absl::StatusOr<std::unique_ptr<DeviceQueue>> NewQueue(const QueueNeeds& needs) override {
    return cpu_.NewQueue(needs);
  }
  std::string description() const override { return cpu_.description(); }
  std::string label() const override { return cpu_.label(); }
  uint64_t memory_bytes() const override { return cpu_.memory_bytes(); }
  bool on_host() const override { return cpu_.on_host(); }
  uint64_t allocated_bytes() const override { return cpu_.allocated_bytes(); }
  double busy_s() const override { return cpu_.busy_s(); }
  absl::StatusOr<std::string> MatrixProducts() override { return cpu_.MatrixProducts(); }
  void Watch(Watcher watcher) override {
    absl::MutexLock lock(&mu_);
    watcher_ = std::move(watcher);
  }

  void AwaitReached() { reached_.WaitForNotification(); }
  void Open() { gate_.Notify(); }
  void Fail(const absl::Status& why) {
    absl::MutexLock lock(&mu_);
    watcher_(why);
  }

 private:
  void Free(std::byte*, uint64_t) override {}  // the CPU's memory goes back to it

  CpuDevice cpu_{{.threads = 1}};
  absl::Notification reached_, gate_;
  absl::Mutex mu_;
  Watcher watcher_ ABSL_GUARDED_BY(mu_);
};

// An answer that comes on another thread.
template <class T>
class Awaited {
 public:
  auto Taker() {
    return [this](absl::StatusOr<T> answer) {
      answer_ = std::move(answer);
      came_.Notify();
    };
  }
  bool came() const { return came_.HasBeenNotified(); }
  const absl::StatusOr<T>& Get() {
    came_.WaitForNotification();
    return answer_;
  }

 private:
  absl::StatusOr<T> answer_ = absl::UnknownError("");
  absl::Notification came_;
};

class RunRegistryTest : public ::testing::Test {
 protected:
  using Made = Awaited<RunRegistry::Created>;
  using Deleted = Awaited<uint64_t>;

  void SetUp() override {
    auto gated = std::make_unique<GatedDevice>();
    device_ = gated.get();
    std::vector<std::unique_ptr<Device>> all;
    all.push_back(std::move(gated));
    devices_ = std::make_unique<DevicePool>(std::move(all), uint64_t{1} << 30);
    runs_ = std::make_unique<RunRegistry>(
        RunRegistry::Options{.devices = devices_.get(), .metrics = &metrics_, .sessions = &sessions_, .max_runs = 3});
  }
  void Create(const std::string& run_id, uint64_t elements, Made* made) {
    RunRegistry::CreateRequest request;
    request.spec = ToRunSpec(testing::MakeSpec(run_id, {{"w", {static_cast<int64_t>(elements)}, "fp32"}}), {}).value();
    runs_->Create(std::move(request), made->Taker());
  }
  // Until it is being made, and goes no further before the gate opens.
  void BeginLarge(Made* made) {
    Create("large", kLarge, made);
    device_->AwaitReached();
  }

  Metrics metrics_{{}};
  Sessions sessions_;
  GatedDevice* device_ = nullptr;
  std::unique_ptr<DevicePool> devices_;
  std::unique_ptr<RunRegistry> runs_;
};

TEST_F(RunRegistryTest, OthersAreMadeJoinedAndDeletedWhileALargeRunIsMade) {
  Made large, one, again, another;
  Deleted deleted;
  Create("one", kSmall, &one);
  ASSERT_TRUE(one.Get().ok()) << one.Get().status();
  BeginLarge(&large);
  Create("one", kSmall, &again);
  ASSERT_TRUE(again.came()) << "it is there, and needs no turn";
  EXPECT_FALSE(again.Get()->created);
  Create("another", kSmall, &another);
  EXPECT_TRUE(another.Get()->created);
  runs_->Delete("another", {}, deleted.Taker());
  EXPECT_TRUE(deleted.Get().ok());
  EXPECT_FALSE(large.came());
  EXPECT_TRUE(absl::IsNotFound(runs_->Find("large").status()));
  device_->Open();
  EXPECT_TRUE(large.Get()->created);
  EXPECT_TRUE(runs_->Find("large").ok());
}

TEST_F(RunRegistryTest, WhatIsAskedForWithARunThatIsMadeWaitsForIt) {
  Made large, again;
  Deleted deleted, once_more;
  BeginLarge(&large);
  Create("large", kLarge, &again);
  runs_->Delete("large", {}, deleted.Taker());
  runs_->Delete("large", {}, once_more.Taker());
  device_->Open();
  EXPECT_TRUE(large.Get()->created);
  EXPECT_FALSE(again.Get()->created);
  EXPECT_EQ(again.Get()->run, large.Get()->run);
  EXPECT_TRUE(deleted.Get().ok());
  EXPECT_TRUE(absl::IsNotFound(once_more.Get().status())) << once_more.Get().status();
  EXPECT_EQ(devices_->reserved_bytes(), 0);
}

TEST_F(RunRegistryTest, ARunThatIsMadeHasItsPlaceAndItsMemory) {
  Made large, second, third, fourth;
  BeginLarge(&large);
  EXPECT_GT(devices_->reserved_bytes(), kLarge);
  Create("second", kSmall, &second);
  Create("third", kSmall, &third);
  Create("fourth", kSmall, &fourth);
  EXPECT_TRUE(second.Get().ok());
  EXPECT_TRUE(third.Get().ok());
  EXPECT_THAT(std::string(fourth.Get().status().message()), HasSubstr("would be run number 4, and max_runs is 3"));
  device_->Open();
  EXPECT_TRUE(large.Get().ok());
}

TEST_F(RunRegistryTest, ADeviceThatFailsMeanwhileFailsTheRun) {
  Made large, one;
  BeginLarge(&large);
  device_->Fail(absl::InternalError("it broke"));
  Create("one", kSmall, &one);  // behind the failure
  EXPECT_FALSE(one.Get().ok());
  device_->Open();
  ASSERT_TRUE(large.Get().ok());
  Deleted deleted;
  runs_->Delete("large", {.force = true}, deleted.Taker());
  EXPECT_TRUE(deleted.Get().ok());
  EXPECT_EQ(large.Get()->run->Status().state, RunState::kFailed);
  EXPECT_THAT(large.Get()->run->Status().failure, HasSubstr("it broke"));
}

TEST_F(RunRegistryTest, TheEndWaitsForARunThatIsMadeWhichIsNoMore) {
  Made large, again;
  BeginLarge(&large);
  Create("large", kLarge, &again);
  std::thread ending([this] { runs_->End(absl::UnavailableError("the daemon is shutting down")); });
  while (!runs_->draining()) std::this_thread::yield();
  device_->Open();
  ending.join();
  EXPECT_TRUE(absl::IsUnavailable(large.Get().status())) << large.Get().status();
  EXPECT_TRUE(absl::IsUnavailable(again.Get().status())) << again.Get().status();
  EXPECT_EQ(devices_->reserved_bytes(), 0);
}

}  // namespace
}  // namespace ballast
