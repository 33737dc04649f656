// The fake daemon's Train stream.
#include <algorithm>

#include "proto/bitmap.h"
#include "proto/checksum.h"

#include "client/cpp/wire/tensor_table.h"
#include "tests/client/fake_daemon.h"

namespace ballast {
namespace {

grpc::Status Refuse(const std::string& what) { return {grpc::StatusCode::FAILED_PRECONDITION, what}; }

}  // namespace

grpc::Status FakeDaemon::Restart() {
  forgot_ = true;
  read_back_ = std::exchange(restarts_at_, std::nullopt);
  restored_ = "/disk/checkpoint-3";
  return {grpc::StatusCode::NOT_FOUND, "no session has this token; Attach first"};
}

grpc::Status FakeDaemon::Train(grpc::ServerContext* context, Stream* stream) {
  {
    absl::MutexLock lock(&mu_);
    ++streams_;
    under_way_ = taken_ = 0;
    context_ = context;
  }
  grpc::Status status = grpc::Status::OK;
  v1::TrainRequest request;
  while (status.ok() && stream->Read(&request)) {
    Responses responses;
    {
      absl::MutexLock lock(&mu_);
      const bool refused = request.has_open() && !train_refusals_.empty();
      status = refused                              ? Tell(context, &train_refusals_)
               : request.has_open() && restarts_at_ ? Restart()
                                                    : Take(request, &responses);
      for (const v1::TrainResponse& response : responses) {
        if (seen_.sent++ == options_.cut_at_sent) status = Cut();
        if (status.ok()) stream->Write(response);
      }
    }
  }
  absl::MutexLock lock(&mu_);
  --streams_;
  if (context_ == context) context_ = nullptr;
  if (status.ok() && !context->IsCancelled()) ++seen_.clean_ends;
  return status;
}

grpc::Status FakeDaemon::Take(const v1::TrainRequest& request, Responses* out) {
  if (seen_.received++ == options_.cut_at_received || forgot_) return Cut();
  v1::TrainRequest record = request;
  if (record.has_gradient()) record.mutable_gradient()->clear_data();
  seen_.requests.push_back(std::move(record));
  out->assign(injected_.begin(), injected_.end());
  injected_.clear();
  switch (request.message_case()) {
    case v1::TrainRequest::kOpen:
      return OnOpen(request.open(), out);
    case v1::TrainRequest::kStepBegin:
      return OnBegin(request.step_begin());
    case v1::TrainRequest::kGradient:
      return OnGradient(request.gradient(), out);
    case v1::TrainRequest::kSmallGradients:
      return OnSmallGradients(request.small_gradients(), out);
    case v1::TrainRequest::kMicroEnd:
      absent_ = UnpackBits(request.micro_end().absent(), static_cast<size_t>(options_.spec.tensors_size()));
      return grpc::Status::OK;
    case v1::TrainRequest::kStepEnd:
      if (!open_) return Refuse("StepEnd without an open step");
      if (auto s = CheckWhole(); !s.ok()) return s;
      seen_.ends.push_back(request.step_end());
      if (options_.answers_step_end) Close(out);
      return grpc::Status::OK;
    default:
      return grpc::Status::OK;
  }
}

grpc::Status FakeDaemon::OnOpen(const v1::Open& open, Responses* out) {
  if (open.session_token() != "token") return {grpc::StatusCode::NOT_FOUND, "no such session"};
  if (!options_.answers_open) return grpc::Status::OK;
  out->emplace_back().mutable_opened()->set_takes_small_gradients(options_.joins_small);
  const uint64_t step = open_ ? step_ : step_ - 1;
  const std::vector<bool> received = UnpackBits(open.weights_received(), 64);
  for (const auto& [tensor, bytes] : updated_) {
    if (open.weights_step() != step || !received[tensor]) SendWeights(tensor, step, out);
  }
  if (!open_ && last_result_) *out->emplace_back().mutable_step_result() = *last_result_;
  for (const v1::StepResult& closed : missed_) *out->emplace_back().mutable_step_result() = closed;
  missed_.clear();
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::OnBegin(const v1::StepBegin& begin) {
  const std::string content = begin.SerializeAsString();
  if (begin.step() != step_) return Refuse("StepBegin of another step");
  if (open_ && content != begin_) return Refuse("StepBegin came again with other values");
  if (!open_) updated_.clear();
  open_ = true;
  begin_ = content;
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::OnGradient(const v1::Gradient& gradient, Responses* out) {
  if (!open_) return Refuse("a gradient without an open step");
  if (Crc32c(BytesOf(gradient.data())) != gradient.crc32c()) return {grpc::StatusCode::DATA_LOSS, "checksum differs"};
  const uint32_t tensor = gradient.tensor();
  const uint64_t first = gradient.chunk() * options_.chunk_elements;
  const uint64_t wanted = std::min(options_.chunk_elements, elements(tensor) - first) * element_bytes(tensor);
  if (gradient.data().size() != wanted) return Refuse("a chunk of the wrong size");
  under_way_ += wanted;
  ++taken_;
  seen_.most_under_way = std::max(seen_.most_under_way, under_way_);
  if (!held_.emplace(std::pair(tensor, gradient.chunk()), gradient.data()).second) ++seen_.duplicates;
  Credit(wanted, out);
  std::string whole;
  for (uint64_t k = 0; k < chunks(tensor); ++k) {
    const auto found = held_.find({tensor, k});
    if (found == held_.end()) return grpc::Status::OK;
    whole += found->second;
  }
  if (!applies(tensor)) return grpc::Status::OK;
  updated_[tensor] = Updated(whole, step_);
  SendWeights(tensor, step_, out);
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::OnSmallGradients(const v1::SmallGradients& small, Responses* out) {
  if (!options_.joins_small) return Refuse("SmallGradients that were not asked for");
  size_t at = 0;
  for (int i = 0; i < small.tensors_size(); ++i, ++seen_.joined) {
    v1::Gradient one;
    one.set_tensor(small.tensors(i));
    one.set_crc32c(small.crc32c(i));
    one.set_data(small.data().substr(at, small.sizes(i)));
    at += small.sizes(i);
    if (auto s = OnGradient(one, out); !s.ok()) return s;
  }
  return grpc::Status::OK;
}

void FakeDaemon::Credit(uint64_t bytes, Responses* out) {
  const uint64_t next_chunk = options_.chunk_elements * 4;
  if (options_.returns_credit_late && under_way_ + next_chunk <= options_.credit_bytes) return;
  v1::Credit* credit = out->emplace_back().mutable_credit();
  if (options_.acknowledges) credit->set_acknowledged(taken_);
  credit->set_bytes(options_.returns_credit_late ? under_way_ : bytes);
  under_way_ -= credit->bytes();
}

grpc::Status FakeDaemon::CheckWhole() {
  for (uint32_t tensor = 0; tensor < absent_.size(); ++tensor) {
    uint64_t held = 0;
    for (uint64_t k = 0; k < chunks(tensor); ++k) held += held_.contains({tensor, k});
    if (held != (absent_[tensor] ? 0 : chunks(tensor))) return Refuse("chunks are missing or too many at StepEnd");
  }
  return grpc::Status::OK;
}

void FakeDaemon::Close(Responses* out) {
  v1::StepResult result = options_.result;
  result.set_step(step_);
  if (result.outcome() == v1::STEP_OUTCOME_UNSPECIFIED) result.set_outcome(v1::STEP_OUTCOME_APPLIED);
  *out->emplace_back().mutable_step_result() = result;
  last_result_ = result;
  client_state_ = seen_.ends.back().client_state();
  held_.clear();
  open_ = false;
  ++step_;
}

void FakeDaemon::SendWeights(uint32_t tensor, uint64_t step, Responses* out) const {
  const std::string& bytes = updated_.at(tensor);
  const uint64_t piece = options_.chunk_elements * element_bytes(tensor);
  if (options_.joins_small && chunks(tensor) == 1) {
    const bool joins = !out->empty() && out->back().has_small_weights() && out->back().small_weights().step() == step;
    v1::SmallWeights* small = (joins ? out->back() : out->emplace_back()).mutable_small_weights();
    small->set_step(step);
    small->add_tensors(tensor);
    small->add_sizes(static_cast<uint32_t>(bytes.size()));
    small->add_crc32c(Crc32c(BytesOf(bytes)) + (options_.damages_weights ? 1 : 0));
    small->mutable_data()->append(bytes);
    return;
  }
  for (uint64_t k = 0; k < chunks(tensor); ++k) {
    v1::Weights* weights = out->emplace_back().mutable_weights();
    weights->set_step(step);
    weights->set_tensor(tensor);
    weights->set_chunk(k);
    weights->set_format(options_.spec.tensors(static_cast<int>(tensor)).dtype());
    weights->set_last(k + 1 == chunks(tensor));
    weights->set_data(bytes.substr(k * piece, piece));
    weights->set_crc32c(Crc32c(BytesOf(weights->data())) + (options_.damages_weights ? 1 : 0));
  }
}

}  // namespace ballast
