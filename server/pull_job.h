// Weights for one reader, the latest or a snapshot's: tensor by tensor, chunk by chunk, encoded when the chunk before
// has been written. A tensor that is updated meanwhile starts again at chunk 0 with its new label; a snapshot that is
// no longer kept ends the job.
//
// Strand-confined. Shared by its run and the device task that fills its buffer. Memory: one chunk while it lasts.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/parameter_store.h"
#include "server/rank_stream.h"
#include "server/snapshot_ring.h"

namespace ballast {

// What is pulled. `snapshot`: SnapshotRing::IdOf; none: the latest weights.
struct PullSource {
  ParameterStore* store = nullptr;
  SnapshotRing* snapshots = nullptr;
  std::optional<uint64_t> snapshot = std::nullopt;
};

class PullJob : public std::enable_shared_from_this<PullJob> {
 public:
  PullJob(const RunSpec* spec, PullSource source, std::shared_ptr<WeightSink> sink, std::vector<uint32_t> tensors);

  void EncodeNext();  // begins
  void OnWritten();
  // The reader is told why and hears no more.
  void Stop(absl::Status status);
  bool stopped() const { return stopped_; }
  const WeightSink* sink() const { return sink_.get(); }

 private:
  void Encode(uint32_t tensor);
  void OnEncoded(bool last);

  const RunSpec* const spec_;
  const PullSource source_;
  const std::shared_ptr<WeightSink> sink_;
  const std::vector<uint32_t> tensors_;
  size_t next_ = 0;  // index into tensors_
  uint64_t chunk_ = 0;
  uint64_t version_ = 0;
  uint64_t label_ = 0;  // step of the tensor's last update when its chunk 0 was encoded
  bool stopped_ = false;
  WeightPiece piece_;
};

}  // namespace ballast
