// A step of the fake daemon's run, as its writer and its reader drive it: without threads and connections.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "proto/bitmap.h"

#include "client/cpp/stream/open_step.h"
#include "tests/client/fake_daemon.h"

namespace ballast {

class OpenStepTest : public ::testing::Test {
 protected:
  OpenStepTest() {
    v1::StepBegin begin;
    begin.set_step(7);
    step_ = std::make_unique<OpenStep>(tensors_, begin, /*micros=*/1, absl::UnixEpoch());
  }

  void Push(uint32_t tensor) { Push(tensor, tensors_[tensor].first_chunk, tensors_[tensor].end_chunk); }
  // Chunks [first, last) of its gradient.
  void Push(uint32_t tensor, uint64_t first, uint64_t last) {
    const std::string gradient(tensors_[tensor].gradient_bytes(), 'g');
    Freed freed;
    step_->Push(tensor, CutIntoChunks(tensors_, tensor, first, last, BytesOf(gradient), &memory_), &freed);
  }

  // Returns what is freed by it.
  std::vector<std::string> End(std::optional<double> loss, v1::StepEnd end = {}, absl::Time now = absl::UnixEpoch()) {
    Freed freed;
    result_ = step_->End(loss, std::move(end), now, &freed);
    return freed.chunks;
  }

  // What the writer would send now, in short.
  std::vector<std::string> Drain(CreditWindow* credit) {
    std::vector<std::string> kinds;
    while (step_->HasRequest(*credit)) {
      v1::TrainRequest request;
      step_->NextRequest(credit, &request);
      kinds.push_back(request.has_gradient()
                          ? absl::StrCat(request.gradient().tensor(), ".", request.gradient().chunk())
                          : request.GetDescriptor()->FindFieldByNumber(request.message_case())->name());
      step_->Sent(&request);
    }
    return kinds;
  }

  uint64_t Acknowledge(uint64_t gradients) {
    Freed freed;
    step_->Acknowledge(gradients, &freed);
    return Bytes(freed.chunks);
  }
  static uint64_t Bytes(const std::vector<std::string>& freed) {
    uint64_t bytes = 0;
    for (const std::string& one : freed) bytes += one.size();
    return bytes;
  }
  static v1::AttachResponse Holding(uint32_t tensor, const std::vector<bool>& chunks) {
    v1::AttachResponse grant;
    grant.set_resume_step(7);
    grant.set_step_open(true);
    v1::ChunksHeld* held = grant.add_held();
    held->set_tensor(tensor);
    held->set_chunks(PackBits(chunks));
    return grant;
  }

  const TensorTable tensors_ = TensorTable::Create(FakeSpec(), 4).value();
  ChunkMemory memory_;
  std::unique_ptr<OpenStep> step_;
  CreditWindow credit_{1 << 20};
  std::future<absl::StatusOr<StepResult>> result_;
};

}  // namespace ballast
