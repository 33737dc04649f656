// The latest weights for one reader: tensor by tensor, chunk by chunk, encoded when the chunk before has been written.
// A tensor that is updated meanwhile starts again at chunk 0 with its new label.
//
// Strand-confined. Shared by its run and the device task that fills its buffer. Memory: one chunk while it lasts.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/parameter_store.h"
#include "server/rank_stream.h"

namespace ballast {

class PullJob : public std::enable_shared_from_this<PullJob> {
 public:
  PullJob(const RunSpec* spec, ParameterStore* store, std::shared_ptr<WeightSink> sink, std::vector<uint32_t> tensors);

  void EncodeNext();  // begins
  void OnWritten();
  // The reader is told why and hears no more.
  void Stop(absl::Status status);
  bool stopped() const { return stopped_; }
  const WeightSink* sink() const { return sink_.get(); }

 private:
  void OnEncoded(bool last);

  const RunSpec* const spec_;
  ParameterStore* const store_;
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
