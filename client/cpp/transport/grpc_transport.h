// The transport over gRPC, which reaches every daemon. Small messages that follow each other go as one. See
// transport.h.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <memory>

#include "client/cpp/transport/connection.h"
#include "client/cpp/transport/transport.h"

namespace ballast {

class GrpcTransport final : public Transport {
 public:
  // `connection` outlives the transport.
  explicit GrpcTransport(Connection& connection) : connection_(connection) {}

  void Start(const v1::TrainRequest& open) override;
  bool Write(v1::TrainRequest* request, bool more) override;
  // As Write, and never as one of several.
  bool WriteAlone(const v1::TrainRequest& request) { return Flush() && stream_->Write(request); }
  bool WritesDone() override { return Flush() && stream_->WritesDone(); }
  bool Read(v1::TrainResponse* response, absl::Span<const std::byte>* data) override;
  // How many responses have arrived beyond those that were read, and the number'th of them. Of the reading thread.
  int ahead() const { return arrived_.batch().responses_size() - next_; }
  const v1::TrainResponse& ahead(int number) const { return arrived_.batch().responses(next_ + number); }
  void Cancel() override { context_.TryCancel(); }
  absl::Status Finish() override { return FromGrpc(stream_->Finish(), context_); }

 private:
  bool Flush();

  Connection& connection_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::TrainRequest, v1::TrainResponse>> stream_;
  std::atomic<bool> takes_batches_ = false;  // the daemon does

  // The writing thread's.
  v1::TrainRequest gathered_;
  size_t gathered_bytes_ = 0;
  int gathered_messages_ = 0;  // a small gradient is one

  // The reading thread's.
  v1::TrainResponse arrived_;
  int next_ = 0;  // of its batch
};

}  // namespace ballast
