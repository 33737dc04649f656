#include "client/cpp/transport/transport.h"

#include <string>

#include "proto/checksum.h"

#include "client/cpp/wire/tensor_table.h"

namespace ballast {

bool WriteThroughRoom(Transport* transport, const GradientRoom& room, v1::TrainRequest* request) {
  v1::Gradient* const gradient = request->mutable_gradient();
  std::string data;
  data.swap(*gradient->mutable_data());
  const uint32_t crc = CopyCrc32c(room.data, BytesOf(data));
  if (gradient->crc32c() == 0) gradient->set_crc32c(crc);
  const bool alive = transport->WriteAt(room, data.size(), *request);
  data.swap(*gradient->mutable_data());
  return alive;
}

}  // namespace ballast
