// A run's snapshot as the files of a checkpoint, and back (proto/CHECKPOINTS.md).
//
// Off the strand: what is read here does not change while the snapshot is pinned. Thread-safe.
#pragma once

#include <functional>
#include <string>

#include "absl/status/statusor.h"

#include "server/run/checkpointed_run.h"
#include "server/spec/run_spec.h"
#include "server/storage/checkpoint_reader.h"
#include "server/storage/checkpoint_writer.h"
#include "server/storage/disk_threads.h"
#include "server/store/parameter_store.h"

namespace ballast {

// What a checkpoint is made of. What is pointed to outlives its writing.
struct CheckpointSource {
  const RunSpec* spec;
  const std::string* canonical_spec;
  const ParameterStore* store;
  const CheckpointCodec* codec;
  const StoreImage* image;
  const RunMemory* memory;
  const std::vector<ParameterStore::UpdateCount>* counts;
  RunFigures figures;
};
CheckpointContent MakeContent(const CheckpointSource& source);

// Reads the planes into the image, which is zeroed in between, and the rest. progress: called as it gets on, on the
// threads. DATA_LOSS names the file that is damaged; the image then holds nothing of use. Without an image (nullptr) all is
// read and compared the same, and the planes go nowhere.
absl::StatusOr<CheckpointedRun> ReadContent(const CheckpointReader& checkpoint, const RunSpec& spec,
                                            const ParameterStore& store, const CheckpointCodec& codec,
                                            DiskThreads* threads, const std::function<void()>& progress,
                                            StoreImage* image);

}  // namespace ballast
