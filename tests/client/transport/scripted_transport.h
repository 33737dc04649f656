// A transport without a daemon, for tests of StepStream: the test says what comes in, sees what went out, and can make
// writes wait. Thread-safe.
#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"

#include "client/cpp/transport/transport.h"
#include "client/cpp/wire/tensor_table.h"

namespace ballast {

class Script {
 public:
  // From now on writes of gradients wait, as for room in a socket, until they are let go on.
  void HoldGradients() { Set(&held_, true); }
  void LetGradientsGo() { Set(&held_, false); }
  void AwaitHeldWrite() {
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&waits_));
  }
  void Say(v1::TrainResponse response) {
    absl::MutexLock lock(&mu_);
    said_.push_back(std::move(response));
  }
  // From now on there are so many rooms for gradients, with slots from 0.
  void GiveRooms(uint32_t rooms, uint64_t bytes) {
    absl::MutexLock lock(&mu_);
    room_bytes_ = bytes;
    for (uint32_t i = 0; i < rooms; ++i) free_rooms_.push_back(i);
    memory_.assign(rooms * bytes, '\0');
  }
  size_t free_rooms() {
    absl::MutexLock lock(&mu_);
    return free_rooms_.size();
  }
  // Of the gradients that were written at a room.
  int written_at() {
    absl::MutexLock lock(&mu_);
    return written_at_;
  }
  void Break() { Set(&over_, true); }
  // The daemon's end is gone, and the reader has not seen it yet.
  void HangUp() { Set(&hung_up_, true); }
  void Scribble() {  // over what lies in the rooms
    absl::MutexLock lock(&mu_);
    memory_.assign(memory_.size(), '?');
  }
  // From now on copies to rooms fail that this thread makes; how many have.
  void FailCopiesOf(std::thread::id thread) {
    absl::MutexLock lock(&mu_);
    fails_ = thread;
  }
  int failed_copies() {
    absl::MutexLock lock(&mu_);
    return failed_copies_;
  }
  // Whether there is room for a request.
  void SetWritesAtOnce(bool at_once) { Set(&writes_at_once_, at_once); }
  // Waits until so many messages were written, and returns them.
  std::vector<v1::TrainRequest> AwaitWritten(size_t messages) {
    absl::MutexLock lock(&mu_);
    const auto there = [&] { return written_.size() >= messages; };
    mu_.Await(absl::Condition(&there));
    return written_;
  }

 private:
  friend class ScriptedTransport;
  void Set(bool* flag, bool value) {
    absl::MutexLock lock(&mu_);
    *flag = value;
  }

  absl::Mutex mu_;
  bool held_ = false, waits_ = false, over_ = false, hung_up_ = false, writes_at_once_ = true;
  std::deque<v1::TrainResponse> said_;
  std::vector<v1::TrainRequest> written_;
  uint64_t room_bytes_ = 0;
  std::deque<uint32_t> free_rooms_;
  std::string memory_;
  int written_at_ = 0, failed_copies_ = 0;
  std::thread::id fails_;
};

class ScriptedTransport final : public Transport {
 public:
  explicit ScriptedTransport(std::shared_ptr<Script> script) : script_(*script), kept_(std::move(script)) {}

  void Start(const v1::TrainRequest&) override {
    v1::TrainResponse opened;
    opened.mutable_opened();
    script_.Say(opened);
  }
  bool Write(v1::TrainRequest* request, bool) override {
    if (request->has_gradient()) FillChecksum(request->mutable_gradient());
    absl::MutexLock lock(&script_.mu_);
    const auto free = [this] { return !script_.held_ || script_.over_; };
    script_.waits_ = request->has_gradient() && script_.held_;
    if (script_.waits_) script_.mu_.Await(absl::Condition(&free));
    script_.waits_ = false;
    script_.written_.push_back(*request);
    return !script_.over_;
  }
  bool HungUp() const override {
    absl::MutexLock lock(&script_.mu_);
    return script_.hung_up_;
  }
  bool has_rooms() const override { return true; }
  bool writes_at_once() const override {
    absl::MutexLock lock(&script_.mu_);
    return script_.writes_at_once_;
  }
  // A room that is not kept is free at once.
  std::optional<GradientRoom> Reserve(uint64_t bytes, bool keep) override {
    absl::MutexLock lock(&script_.mu_);
    if (script_.free_rooms_.empty() || bytes != script_.room_bytes_) return std::nullopt;
    const uint32_t slot = script_.free_rooms_.front();
    script_.free_rooms_.pop_front();
    if (!keep) script_.free_rooms_.push_back(slot);
    return GradientRoom{.data = reinterpret_cast<std::byte*>(script_.memory_.data()) + slot * script_.room_bytes_,
                        .slot = slot};
  }
  void Release(uint32_t slot) override {
    absl::MutexLock lock(&script_.mu_);
    script_.free_rooms_.push_back(slot);
  }
  absl::StatusOr<uint32_t> Fill(const GradientRoom& room, absl::Span<const std::byte> payload) override {
    absl::MutexLock lock(&script_.mu_);
    if (script_.fails_ != std::this_thread::get_id()) return Transport::Fill(room, payload);
    ++script_.failed_copies_;
    return absl::InternalError("the GPU has failed");
  }
  bool WriteAt(const GradientRoom& room, uint64_t bytes, const v1::TrainRequest& request) override {
    EXPECT_TRUE(request.gradient().data().empty());
    v1::TrainRequest whole = request;
    whole.mutable_gradient()->set_data(std::string(reinterpret_cast<const char*>(room.data), bytes));
    {
      absl::MutexLock lock(&script_.mu_);
      ++script_.written_at_;
    }
    return Write(&whole, false);
  }
  bool WritesDone() override {
    Cancel();
    return true;
  }
  bool Read(v1::TrainResponse* response, absl::Span<const std::byte>* data) override {
    absl::MutexLock lock(&script_.mu_);
    const auto there = [this] { return !script_.said_.empty() || script_.over_; };
    script_.mu_.Await(absl::Condition(&there));
    if (script_.over_) return false;
    *response = std::move(script_.said_.front());
    script_.said_.pop_front();
    *data = BytesOf(response->weights().data());
    return true;
  }
  void Cancel() override { script_.Set(&script_.over_, true); }
  absl::Status Finish() override { return absl::CancelledError("the script is over"); }

 private:
  Script& script_;
  const std::shared_ptr<Script> kept_;
};

}  // namespace ballast
