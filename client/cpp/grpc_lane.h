// The lane that reaches everywhere. See lane.h.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>

#include "client/cpp/connection.h"
#include "client/cpp/lane.h"

namespace ballast {

class GrpcLane final : public Lane {
 public:
  // `connection` outlives the lane.
  explicit GrpcLane(Connection& connection) : connection_(connection) {}

  void Start(const v1::TrainRequest& open) override;
  bool Write(v1::TrainRequest* request) override { return stream_->Write(*request); }
  bool WritesDone() override { return stream_->WritesDone(); }
  bool Read(v1::TrainResponse* response, absl::Span<const std::byte>* data) override;
  void Cancel() override { context_.TryCancel(); }
  absl::Status Finish() override { return FromGrpc(stream_->Finish()); }

 private:
  Connection& connection_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::TrainRequest, v1::TrainResponse>> stream_;
};

}  // namespace ballast
