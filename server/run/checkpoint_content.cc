#include "server/run/checkpoint_content.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "proto/checkpoint/manifest.h"

#include "server/base/status_macros.h"
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

// The padding of planes: it is zero in every run, and an image may have been used before.
void ZeroImage(StoreImage* image) {
  for (const DeviceBuffer& shard : image->shards) std::memset(shard.data(), 0, shard.bytes());
}

absl::Span<std::byte> AsWritable(std::string* text) {
  return {reinterpret_cast<std::byte*>(text->data()), text->size()};
}

// The file into the pieces, of which the first is `header`.
absl::Status ReadChecked(const CheckpointReader& checkpoint, const std::string& name,
                         const std::vector<absl::Span<std::byte>>& pieces, const std::string& header,
                         const std::string& wanted_header, const DiskBuffer& buffer) {
  const absl::Status status = checkpoint.ReadInto(name, pieces, buffer);
  if (!status.ok() && !absl::IsInvalidArgument(status)) return status;
  if (status.ok() && header == wanted_header) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(checkpoint.folder(), "/", name, " is not of this run: ", kSpecName, " and ",
                                          kRunName, " lead to another size or header"));
}

absl::Status ReadShard(const CheckpointReader& checkpoint, const CheckpointShard& shard, const ParameterStore& store,
                       const StoreImage& image, const DiskBuffer& buffer) {
  std::string header(shard.header.size(), '\0');
  std::vector<absl::Span<std::byte>> pieces = {AsWritable(&header)};
  for (const CheckpointPlane& plane : shard.planes)
    pieces.push_back(store.SavedPlane(image, plane.tensor, plane.plane));
  return ReadChecked(checkpoint, shard.name, pieces, header, shard.header, buffer);
}

// The header's part of client_state.safetensors, and each rank's bytes.
absl::Status ReadClientStates(const CheckpointReader& checkpoint, const DiskBuffer& buffer, RunMemory* memory) {
  const std::string wanted = ClientStateHeader(ClientStateSizes(*memory));
  std::string header(wanted.size(), '\0');
  std::vector<absl::Span<std::byte>> pieces = {AsWritable(&header)};
  for (auto& state : memory->client_states) {
    if (state) pieces.push_back(AsWritable(&state->bytes));
  }
  return ReadChecked(checkpoint, std::string(kClientStateName), pieces, header, wanted, buffer);
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
                                            DiskThreads* threads, StoreImage* image) {
  ASSIGN_OR_RETURN(const std::string json, checkpoint.ReadText(kRunName));
  ASSIGN_OR_RETURN(CheckpointedRun run, codec.read_run(spec, json, absl::StrCat(checkpoint.folder(), "/", kRunName)));
  if (run.memory.result.step != checkpoint.manifest().step()) {
    return absl::DataLossError(absl::StrCat(checkpoint.folder(), "/", kRunName, " is of step ", run.memory.result.step,
                                            ", and ", kManifestName, " beside it of step ",
                                            checkpoint.manifest().step()));
  }
  ZeroImage(image);
  const std::vector<CheckpointShard> shards = LayOutCheckpoint(spec);
  const size_t client_states = HasClientState(run.memory) ? 1 : 0;
  absl::Mutex mu;
  absl::Status first;
  threads->ForEach(shards.size() + client_states, [&](size_t s, const DiskBuffer& buffer) {
    const absl::Status status = s < shards.size() ? ReadShard(checkpoint, shards[s], store, *image, buffer)
                                                  : ReadClientStates(checkpoint, buffer, &run.memory);
    absl::MutexLock lock(&mu);
    first.Update(status);
  });
  RETURN_IF_ERROR(first);
  return run;
}

}  // namespace ballast
