#include "client/cpp/transport/transport.h"

#include <string>

#include "proto/checksum.h"

#include "client/cpp/wire/tensor_table.h"

namespace ballast {

absl::StatusOr<uint32_t> Transport::Fill(const GradientRoom& room, absl::Span<const std::byte> payload) {
  return CopyCrc32c(room.data, payload);
}

absl::StatusOr<bool> WriteThroughRoom(Transport* transport, const GradientRoom& room, v1::TrainRequest* request) {
  v1::Gradient* const gradient = request->mutable_gradient();
  std::string data;
  data.swap(*gradient->mutable_data());
  const absl::StatusOr<uint32_t> crc = transport->Fill(room, BytesOf(data));
  bool alive = crc.ok();
  if (alive) {
    if (gradient->crc32c() == 0) gradient->set_crc32c(*crc);
    alive = transport->WriteAt(room, data.size(), *request);
  }
  data.swap(*gradient->mutable_data());
  return crc.ok() ? absl::StatusOr<bool>(alive) : crc.status();
}

}  // namespace ballast
