// ballast::Subscriber for the process that has opened it: in a fork each call is refused, and its end touches nothing, as
// OwnClient's does (client/cpp/own_client.h). subscriber.h says what the calls do.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "client/cpp/follow/subscriber.h"
#include "client/cpp/transport/fork_watch.h"

namespace ballast {

class OwnSubscriber final : public Subscriber {
 public:
  explicit OwnSubscriber(std::unique_ptr<Subscriber> subscriber) : subscriber_(std::move(subscriber)) {}
  ~OwnSubscriber() override {
    if (!CheckNotForked().ok()) KeepForGood(std::move(subscriber_));
  }

  absl::StatusOr<std::optional<FollowedVersion>> Next(double timeout_s) override {
    return UnlessForked([&] { return subscriber_->Next(timeout_s); });
  }
  bool Await(double timeout_s) override { return !CheckNotForked().ok() || subscriber_->Await(timeout_s); }
  const v1::RunSpec& spec() const override { return subscriber_->spec(); }
  bool readable() const override { return CheckNotForked().ok() && subscriber_->readable(); }
  absl::StatusOr<FollowedTensor> Served(uint32_t tensor) const override {
    return UnlessForked([&] { return subscriber_->Served(tensor); });
  }
  absl::Status Read(uint32_t tensor, absl::Span<std::byte> out) const override {
    return UnlessForked([&] { return subscriber_->Read(tensor, out); });
  }
  absl::StatusOr<uint64_t> CountChanged(uint32_t tensor) const override {
    return UnlessForked([&] { return subscriber_->CountChanged(tensor); });
  }
  absl::Status ReadChanged(uint32_t tensor, absl::Span<int64_t> places, absl::Span<std::byte> values) const override {
    return UnlessForked([&] { return subscriber_->ReadChanged(tensor, places, values); });
  }
  absl::Status Rollback(const std::string& tag) override {
    return UnlessForked([&] { return subscriber_->Rollback(tag); });
  }
  void Resume() override {
    if (CheckNotForked().ok()) subscriber_->Resume();
  }
  void Close() override {
    if (CheckNotForked().ok()) subscriber_->Close();
  }

 private:
  std::unique_ptr<Subscriber> subscriber_;
};

}  // namespace ballast
