#include "client/cpp/stream/load_writer.h"

#include <utility>

#include "proto/batch.h"

namespace ballast {

LoadWriter::LoadWriter(grpc::ClientWriter<v1::LoadStateRequest>* writer, const std::string& token,
                       const Options& options)
    : writer_(writer), options_(options), token_(token) {}

bool LoadWriter::Write(v1::LoadStateRequest request) {
  const size_t bytes = request.ByteSizeLong();
  if (!options_.takes_batches || bytes > kMostBatchedBytes) return Flush() && Send(&request, 1);
  batch_.mutable_batch()->Add(std::move(request));
  batch_bytes_ += bytes;
  return !BatchIsFull(batch_.batch_size(), batch_bytes_) || Flush();
}

bool LoadWriter::Flush() {
  if (batch_.batch_size() == 0) return true;
  const bool written = Send(&batch_, static_cast<uint64_t>(batch_.batch_size()));
  batch_.Clear();
  batch_bytes_ = 0;
  return written;
}

bool LoadWriter::Send(v1::LoadStateRequest* request, uint64_t messages) {
  request->set_replace(options_.replace && !token_.empty());
  request->set_session_token(std::exchange(token_, {}));
  if (!writer_->Write(*request)) return false;
  sent_ += messages;
  return true;
}

}  // namespace ballast
