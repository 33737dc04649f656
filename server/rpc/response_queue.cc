#include "server/rpc/response_queue.h"

#include <utility>

#include "proto/batch.h"

#include "server/rpc/train_messages.h"

namespace ballast {

bool ResponseQueue::Add(const v1::TrainResponse* response) {
  const size_t bytes = response->ByteSizeLong();
  if (takes_batches_ && bytes <= kMostBatchedBytes) {
    if (!Join(*response)) *gathered_.mutable_batch()->add_responses() = *response;
    gathered_bytes_ += bytes;
    owed_ = full() && writing_;
  } else {
    waiting_ = response;
    owed_ = true;
  }
  return !owed_;
}

bool ResponseQueue::Join(const v1::TrainResponse& response) {
  if (!takes_small_weights_ || !response.has_weights() || !AreSmall(response.weights())) return false;
  auto& gathered = *gathered_.mutable_batch()->mutable_responses();
  const bool follows = !gathered.empty() && gathered.rbegin()->has_small_weights();
  if (follows && AddSmallWeights(response.weights(), gathered.rbegin()->mutable_small_weights())) return true;
  return AddSmallWeights(response.weights(), gathered.Add()->mutable_small_weights());
}

bool ResponseQueue::full() const { return BatchIsFull(gathered_.batch().responses_size(), gathered_bytes_); }

void ResponseQueue::DropGathered() {
  gathered_.mutable_batch()->clear_responses();
  gathered_bytes_ = 0;
}

const v1::TrainResponse* ResponseQueue::Next() {
  if (writing_ || empty()) return nullptr;
  writing_ = true;
  if (gathered_bytes_ == 0) return std::exchange(waiting_, nullptr);
  batch_.Swap(&gathered_);
  DropGathered();
  return &batch_;
}

bool ResponseQueue::Written(bool ok) {
  writing_ = false;
  if (!ok) {
    DropGathered();
    waiting_ = nullptr;
  }
  return waiting_ == nullptr && std::exchange(owed_, false);
}

}  // namespace ballast
