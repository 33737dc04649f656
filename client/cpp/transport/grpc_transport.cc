#include "client/cpp/transport/grpc_transport.h"

#include "proto/batch.h"

#include "client/cpp/wire/tensor_table.h"

namespace ballast {

void GrpcTransport::Start(const v1::TrainRequest& open) {
  v1::TrainRequest first = open;
  first.mutable_open()->set_takes_batches(true);
  stream_ = connection_.trainer().Train(&context_);
  stream_->Write(first);  // whether it went, Read says
}

bool GrpcTransport::Write(v1::TrainRequest* request, bool more) {
  if (request->has_gradient()) FillChecksum(request->mutable_gradient());
  const size_t bytes = request->ByteSizeLong();
  const bool alone = !takes_batches_ || bytes > kMostBatchedBytes || (!more && gathered_bytes_ == 0);
  if (alone) return Flush() && stream_->Write(*request);
  const int messages = request->has_small_gradients() ? request->small_gradients().tensors_size() : 1;
  if (gathered_messages_ + messages > kMostBatchMessages && !Flush()) return false;
  *gathered_.mutable_batch()->add_requests() = *request;
  gathered_bytes_ += bytes;
  gathered_messages_ += messages;
  return (more && !BatchIsFull(gathered_messages_, gathered_bytes_)) || Flush();
}

bool GrpcTransport::Flush() {
  if (gathered_bytes_ == 0) return true;
  const bool written = stream_->Write(gathered_);
  gathered_.mutable_batch()->clear_requests();
  gathered_bytes_ = 0;
  gathered_messages_ = 0;
  return written;
}

bool GrpcTransport::Read(v1::TrainResponse* response, absl::Span<const std::byte>* data) {
  while (next_ == arrived_.batch().responses_size()) {
    if (!stream_->Read(&arrived_)) return false;
    next_ = 0;
    if (!arrived_.has_batch()) break;
  }
  response->Swap(arrived_.has_batch() ? arrived_.mutable_batch()->mutable_responses(next_++) : &arrived_);
  if (response->has_opened()) takes_batches_ = response->opened().takes_batches();
  *data = BytesOf(response->weights().data());
  return true;
}

}  // namespace ballast
