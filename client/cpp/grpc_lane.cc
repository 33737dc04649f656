#include "client/cpp/grpc_lane.h"

#include "client/cpp/tensor_table.h"

namespace ballast {

void GrpcLane::Start(const v1::TrainRequest& open) {
  stream_ = connection_.trainer().Train(&context_);
  stream_->Write(open);  // whether it went, Read says
}

bool GrpcLane::Read(v1::TrainResponse* response, absl::Span<const std::byte>* data) {
  if (!stream_->Read(response)) return false;
  *data = BytesOf(response->weights().data());
  return true;
}

}  // namespace ballast
