#include "server/run/checkpoint_content.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/checkpoint/manifest.h"

#include "server/base/status_macros.h"
#include "server/spec/stored_planes.h"
#include "server/store/checkpoint_layout.h"

namespace ballast {
namespace {

// The texts that pieces lie in.
struct Texts {
  std::vector<CheckpointShard> shards;
  std::string index, run, spec, client_state;
};

absl::Span<const std::byte> AsBytes(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

std::vector<uint64_t> ClientStateSizes(const RunMemory& memory) {
  std::vector<uint64_t> sizes;
  for (const auto& state : memory.client_states) sizes.push_back(state ? state->bytes.size() : 0);
  return sizes;
}

bool HasClientState(const RunMemory& memory) {
  return std::any_of(memory.client_states.begin(), memory.client_states.end(),
                     [](const std::optional<ClientState>& state) { return state && !state->bytes.empty(); });
}

FileContent PlanesOf(const CheckpointSource& source, const CheckpointShard& shard) {
  FileContent file{.name = shard.name, .pieces = {AsBytes(shard.header)}};
  for (const CheckpointPlane& plane : shard.planes) {
    file.pieces.push_back(source.store->SavedPlane(*source.image, plane.tensor, plane.plane));
  }
  return file;
}

FileContent ClientStates(const RunMemory& memory, const std::string& header) {
  FileContent file{.name = std::string(kClientStateName), .pieces = {AsBytes(header)}};
  for (const auto& state : memory.client_states) {
    if (state) file.pieces.push_back(AsBytes(state->bytes));
  }
  return file;
}

absl::Span<std::byte> AsWritable(std::string* text) {
  return {reinterpret_cast<std::byte*>(text->data()), text->size()};
}

// A file that begins with a header which this run leads to.
struct Incoming {
  std::string name, wanted_header, header = std::string(wanted_header.size(), '\0');
  std::optional<FileReader> reader = {};

  absl::Status Open(const CheckpointReader& checkpoint, std::vector<absl::Span<std::byte>> pieces) {
    pieces.insert(pieces.begin(), AsWritable(&header));
    auto opened = checkpoint.OpenFile(name, std::move(pieces));
    if (absl::IsInvalidArgument(opened.status())) return NotOfThisRun(checkpoint);
    if (opened.ok()) reader.emplace(*std::move(opened));
    return opened.status();
  }
  absl::Status Check(const CheckpointReader& checkpoint) const {
    return header == wanted_header ? absl::OkStatus() : NotOfThisRun(checkpoint);
  }
  absl::Status NotOfThisRun(const CheckpointReader& checkpoint) const {
    return absl::DataLossError(absl::StrCat(checkpoint.folder(), "/", name, " is not of this run: ", kSpecName, " and ",
                                            kRunName, " lead to another size or header"));
  }
};
using IncomingFiles = std::vector<std::unique_ptr<Incoming>>;  // that stay where they are: headers are read into them

// Where a plane is to be read into. Its padding is zeroed: it is so in every run, and an image may have been used before.
// Without an image it is nowhere.
absl::Span<std::byte> RoomOf(const CheckpointPlane& plane, const RunSpec& spec, const ParameterStore& store,
                             const StoreImage* image) {
  if (image == nullptr) return {static_cast<std::byte*>(nullptr), static_cast<size_t>(plane.bytes)};
  const TensorSpec& tensor = spec.tensors[plane.tensor];
  const kernels::Plane kind = StoredPlanes(spec, tensor)[plane.plane];
  const absl::Span<std::byte> used = store.SavedPlane(*image, plane.tensor, plane.plane);
  std::memset(used.data() + used.size(), 0, kernels::PlaneBytes(kind, tensor.elements) - used.size());
  return used;
}

// The planes, and each rank's client state.
absl::StatusOr<IncomingFiles> OpenFiles(const CheckpointReader& checkpoint, const RunSpec& spec,
                                        const ParameterStore& store, const StoreImage* image, RunMemory* memory) {
  IncomingFiles files;
  for (const CheckpointShard& shard : LayOutCheckpoint(spec)) {
    std::vector<absl::Span<std::byte>> planes;
    for (const CheckpointPlane& plane : shard.planes) planes.push_back(RoomOf(plane, spec, store, image));
    files.push_back(std::make_unique<Incoming>(Incoming{.name = shard.name, .wanted_header = shard.header}));
    RETURN_IF_ERROR(files.back()->Open(checkpoint, std::move(planes)));
  }
  if (!HasClientState(*memory)) return files;
  files.push_back(std::make_unique<Incoming>(
      Incoming{.name = std::string(kClientStateName), .wanted_header = ClientStateHeader(ClientStateSizes(*memory))}));
  std::vector<absl::Span<std::byte>> states;
  for (auto& state : memory->client_states) {
    if (state) states.push_back(AsWritable(&state->bytes));
  }
  RETURN_IF_ERROR(files.back()->Open(checkpoint, std::move(states)));
  return files;
}

// Their blocks side by side.
absl::Status ReadFiles(const IncomingFiles& files, DiskThreads* threads, const std::function<void()>& progress) {
  std::vector<std::pair<const FileReader*, size_t>> blocks;
  for (const auto& file : files) {
    for (size_t block = 0; block < file->reader->blocks(); ++block) blocks.emplace_back(&*file->reader, block);
  }
  return threads->ForEach(blocks.size(), [&](size_t i, const DiskBuffer& buffer) {
    progress();
    return blocks[i].first->Read(blocks[i].second, buffer);
  });
}

}  // namespace

CheckpointContent MakeContent(const CheckpointSource& source) {
  const auto texts = std::make_shared<Texts>();
  texts->shards = LayOutCheckpoint(*source.spec);
  texts->index = CheckpointIndex(*source.spec, texts->shards);
  texts->run = source.codec->run_json(*source.spec, source.figures, *source.memory, *source.counts);
  texts->spec = source.codec->spec_json(*source.canonical_spec);
  CheckpointContent content{.files = {}, .owned = texts};
  // The largest first, so that the threads end together.
  for (const CheckpointShard& shard : texts->shards) content.files.push_back(PlanesOf(source, shard));
  if (HasClientState(*source.memory)) {
    texts->client_state = ClientStateHeader(ClientStateSizes(*source.memory));
    content.files.push_back(ClientStates(*source.memory, texts->client_state));
  }
  content.files.push_back({.name = std::string(kIndexName), .pieces = {AsBytes(texts->index)}});
  content.files.push_back({.name = std::string(kRunName), .pieces = {AsBytes(texts->run)}});
  content.files.push_back({.name = std::string(kSpecName), .pieces = {AsBytes(texts->spec)}});
  return content;
}

absl::StatusOr<CheckpointedRun> ReadContent(const CheckpointReader& checkpoint, const RunSpec& spec,
                                            const ParameterStore& store, const CheckpointCodec& codec,
                                            DiskThreads* threads, const std::function<void()>& progress,
                                            StoreImage* image) {
  ASSIGN_OR_RETURN(const std::string json, checkpoint.ReadText(kRunName));
  ASSIGN_OR_RETURN(CheckpointedRun run, codec.read_run(spec, json, absl::StrCat(checkpoint.folder(), "/", kRunName)));
  if (run.memory.result.step != checkpoint.manifest().step()) {
    return absl::DataLossError(absl::StrCat(checkpoint.folder(), "/", kRunName, " is of step ", run.memory.result.step,
                                            ", and ", kManifestName, " beside it of step ",
                                            checkpoint.manifest().step()));
  }
  ASSIGN_OR_RETURN(const IncomingFiles files, OpenFiles(checkpoint, spec, store, image, &run.memory));
  RETURN_IF_ERROR(ReadFiles(files, threads, progress));
  for (const auto& file : files) RETURN_IF_ERROR(file->Check(checkpoint));
  return run;
}

}  // namespace ballast
