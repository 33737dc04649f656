#include "tests/server/rpc/wire.h"

#include "proto/checksum.h"

namespace ballast::testing {

Wire::~Wire() {
  if (!finished_) Hang();
}

grpc::ClientReaderWriter<v1::TrainRequest, v1::TrainResponse>& Wire::stream() {
  if (stream_ == nullptr) stream_ = stub_->Train(&context_);
  return *stream_;
}

bool Wire::Send(const v1::TrainRequest& request) {
  if (held_) {
    *held_->add_requests() = request;
    return true;
  }
  if (transport_ == nullptr) return stream().Write(request);
  v1::TrainRequest copy = request;
  return transport_->Write(&copy, /*more=*/false);
}

bool Wire::Release() {
  v1::TrainRequest request;
  *request.mutable_batch() = *std::exchange(held_, std::nullopt);
  return Send(request);
}

bool Wire::Open(const std::string& token, const v1::Open& rest) {
  v1::TrainRequest request;
  *request.mutable_open() = rest;
  request.mutable_open()->set_session_token(token);
  auto transport = OpenTestTransport(token);
  refused_ = transport.status();
  if (!transport.ok()) return false;
  transport_ = *std::move(transport);
  if (transport_ != nullptr) {
    transport_->Start(request);
  } else if (!Send(request)) {
    return false;
  }
  const auto answer = Read();
  return answer && answer->has_opened();
}

bool Wire::Begin(uint64_t step, std::optional<double> lr) {
  v1::TrainRequest request;
  request.mutable_step_begin()->set_step(step);
  if (lr) request.mutable_step_begin()->add_groups()->set_lr(*lr);
  return Send(request);
}

bool Wire::Chunk(const v1::Gradient& gradient) {
  v1::TrainRequest request;
  *request.mutable_gradient() = gradient;
  return Send(request);
}

bool Wire::BeginMicro(uint32_t micro, bool last) {
  v1::TrainRequest request;
  request.mutable_micro_begin()->set_micro(micro);
  request.mutable_micro_begin()->set_last(last);
  return Send(request);
}

bool Wire::EndMicro(uint32_t micro, const std::string& absent, std::optional<double> loss) {
  v1::TrainRequest request;
  request.mutable_micro_end()->set_micro(micro);
  request.mutable_micro_end()->set_absent(absent);
  if (loss) request.mutable_micro_end()->set_loss(*loss);
  return Send(request);
}

bool Wire::EndStep(const std::string& absent, std::optional<double> loss, uint32_t micro) {
  v1::TrainRequest end;
  end.mutable_step_end();
  return EndMicro(micro, absent, loss) && Send(end);
}

std::optional<v1::TrainResponse> Wire::Read() {
  v1::TrainResponse response;
  while (transport_ == nullptr) {
    if (!batch_.empty()) {
      response = std::move(batch_.front());
      batch_.pop_front();
      return response;
    }
    if (!refused_.ok() || !stream().Read(&response)) return std::nullopt;
    if (!response.has_batch()) return response;
    const auto& responses = response.batch().responses();
    batch_.assign(responses.begin(), responses.end());
    if (responses.size() > 1) ++batches_read_;
  }
  absl::Span<const std::byte> data;
  if (!transport_->Read(&response, &data)) return std::nullopt;
  if (!data.empty()) response.mutable_weights()->set_data(data.data(), data.size());
  return response;
}

bool Wire::AwaitWeights() {
  std::optional<v1::TrainResponse> answer;
  do {
    answer = Read();
  } while (answer && !answer->has_weights() && !answer->has_small_weights());
  return answer.has_value();
}

grpc::Status Wire::Finish() {
  while (Read()) {
  }
  finished_ = true;
  const absl::Status status = transport_ != nullptr ? transport_->Finish() : refused_;
  if (!status.ok()) return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message())};
  return transport_ != nullptr ? grpc::Status::OK : stream().Finish();
}

grpc::Status Wire::Hang() {
  transport_ != nullptr ? transport_->Cancel() : context_.TryCancel();
  return Finish();
}

StepAnswer ReadStep(Wire* wire) {
  StepAnswer answer;
  while (!answer.result) {
    const auto response = wire->Read();
    if (!response) return answer;
    if (response->has_credit()) answer.credit += response->credit().bytes();
    if (response->has_step_result()) answer.result = response->step_result();
    if (response->has_weights()) Take(response->weights(), &answer);
    if (response->has_small_weights()) Take(response->small_weights(), &answer);
  }
  return answer;
}

void Take(const v1::SmallWeights& small, StepAnswer* answer) {
  v1::Weights one;
  one.set_step(small.step());
  size_t at = 0;
  for (int i = 0; i < small.tensors_size(); ++i) {
    one.set_tensor(small.tensors(i));
    one.set_crc32c(small.crc32c(i));
    one.set_data(small.data().substr(at, small.sizes(i)));
    at += small.sizes(i);
    Take(one, answer);
  }
  answer->together += static_cast<uint64_t>(small.tensors_size());
  answer->most_together_bytes = std::max<uint64_t>(answer->most_together_bytes, small.data().size());
}

void Take(const v1::Weights& w, StepAnswer* answer) {
  std::string& tensor = answer->weights[w.tensor()];
  std::vector<float>& scales = answer->scales[w.tensor()];
  if (w.chunk() == 0) tensor.clear(), scales.clear();
  tensor += w.data();
  scales.insert(scales.end(), w.scales().begin(), w.scales().end());
  answer->labels[w.tensor()] = w.step();
  answer->checksums_right &= Crc32c(Bytes(w.data())) == w.crc32c();
}

}  // namespace ballast::testing
