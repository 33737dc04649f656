// Where versions go: the stream of one reader.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "server/follow/version.h"

namespace ballast {

// What a version begins with: ballast.v1.VersionBegin.
struct VersionOpening {
  VersionId id;
  std::optional<VersionId> base = {};
  uint64_t bytes = 0, skipped = 0;
  double closed_unix_s = 0;
};

// A chunk that is changed, or whole: ballast.v1.ChangedChunk. Valid during the call.
struct VersionChunk {
  uint32_t tensor = 0;
  uint64_t chunk = 0;
  kernels::WireIndex format = 0;  // of the values
  PositionCoding position_coding = PositionCoding::kAll;
  ValueCoding value_coding = ValueCoding::kCodes;
  uint64_t count = 0;
  absl::string_view positions = {}, values = {};
  absl::Span<const float> scales = {};
  uint32_t crc32c = 0;
  bool last = false;
  uint64_t digest = 0;
  uint64_t bytes() const { return positions.size() + values.size() + scales.size() * sizeof(float); }
};

struct VersionClosing {
  VersionId id;
  uint64_t changed = 0, elements = 0;
};

// Shared by its transport, until the call is over, and the run, until it has let go. Called on the strand.
class VersionSink {
 public:
  virtual ~VersionSink() = default;
  // It is one of the readers that the run may have, from now on.
  virtual void OnTaken() {}
  // What is written is gathered into one message, until Send.
  virtual void Write(const VersionOpening& opening) = 0;
  virtual void Write(const VersionChunk& chunk) = 0;
  virtual void Write(const VersionClosing& closing) = 0;
  // Whether a chunk of so many bytes, or the beginning of a version, may be gathered besides.
  virtual bool HasRoom(uint64_t bytes) const = 0;
  // Sends what was gathered; Run::OnVersionSent says when the next may be written. False: the stream is over, and no
  // answer comes.
  virtual bool Send() = 0;
  // Ends the stream. Idempotent: the first status stands.
  virtual void Finish(absl::Status status) = 0;
  // Ends the stream at once, whatever the peer does.
  virtual void Cancel() = 0;
};

}  // namespace ballast
