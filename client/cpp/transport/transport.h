// One Train stream as a client sees it, over gRPC or over memory shared with a daemon on the same host.
//
// Start comes first. Then one thread reads and one at a time writes; Cancel: any thread, also before Start. Finish: the
// reading thread, once Read was false and nobody writes any more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "ballast/v1/trainer.pb.h"

namespace ballast {

// Room for a gradient's payload, where the daemon reads it; in the memory of a GPU, if that is the transport's.
struct GradientRoom {
  std::byte* data = nullptr;
  uint32_t slot = 0;
};

class Transport {
 public:
  static constexpr uint64_t kUnbounded = std::numeric_limits<uint64_t>::max();

  virtual ~Transport() = default;

  virtual void Start(const v1::TrainRequest& open) = 0;
  // Writes the request, and leaves it unchanged, but for the checksum of a gradient that has none (0), which is filled
  // in. `more`: another follows at once, so this one may be kept until then.
  // False: the stream is over, and the reader learns why.
  virtual bool Write(v1::TrainRequest* request, bool more) = 0;
  virtual bool WritesDone() = 0;
  // Whether Reserve ever gives room.
  virtual bool has_rooms() const { return false; }
  // Whether a request that is written now is written at once, however slow the daemon. Of who may write.
  virtual bool writes_at_once() const { return false; }
  // Room of so many bytes, for WriteAt. keep: what is in it stays until Release, for whoever may have to send it again.
  // None: none is free, and Write takes the gradient. One call at a time, with Release.
  virtual std::optional<GradientRoom> Reserve(uint64_t /*bytes*/, bool /*keep*/) { return std::nullopt; }
  virtual void Release(uint32_t /*slot*/) {}
  // Copies a gradient's payload to the room, and returns its checksum; 0: it is not known, and not needed. INTERNAL: the
  // trainer's GPU has failed.
  virtual absl::StatusOr<uint32_t> Fill(const GradientRoom& room, absl::Span<const std::byte> payload);
  // As Write, of a gradient without data: that is in the room, so many bytes, and its checksum in the request.
  virtual bool WriteAt(const GradientRoom& /*room*/, uint64_t /*bytes*/, const v1::TrainRequest& /*request*/) {
    return false;
  }
  // How many gradients may be written before others are summed. Any thread.
  virtual uint64_t slots_free() const { return kUnbounded; }
  // Waits for a response. *data: the payload of a Weights message, valid until the next Read.
  virtual bool Read(v1::TrainResponse* response, absl::Span<const std::byte>* data) = 0;
  // Whether that payload is in the memory of a GPU; it has no checksum then.
  virtual bool reads_on_gpu() const { return false; }
  // Whether rooms are in the memory of a GPU. Any thread.
  virtual bool on_gpu() const { return false; }
  // Whether the daemon's end is known to be gone, before a reader that sleeps has looked. Any thread.
  virtual bool HungUp() const { return false; }
  virtual void Cancel() = 0;
  // How the stream ended, in the daemon's words, or UNAVAILABLE.
  virtual absl::Status Finish() = 0;
};

// As transport->Write of a gradient, by way of a room, where its payload is copied to. An error as in Fill.
absl::StatusOr<bool> WriteThroughRoom(Transport* transport, const GradientRoom& room, v1::TrainRequest* request);

}  // namespace ballast
