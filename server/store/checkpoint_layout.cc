#include "server/store/checkpoint_layout.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "proto/checkpoint/safetensors_header.h"

#include "server/spec/stored_planes.h"

namespace ballast {
namespace {

// Of a plane's words. The first plane of a master is a number of its own, of the others only the words are told.
absl::string_view DtypeOf(const kernels::Plane& plane, bool is_weight) {
  if (is_weight) return plane.bytes == 1 ? "F8_E4M3" : plane.bytes == 2 ? "BF16" : "F32";
  return plane.bytes == 1 ? "U8" : plane.bytes == 2 ? "U16" : "U32";
}

struct OpenShard {
  SafetensorsHeader header;
  std::vector<CheckpointPlane> planes;
};

void AddPlane(const RunSpec& spec, uint32_t tensor, size_t plane, OpenShard* shard) {
  const TensorSpec& t = spec.tensors[tensor];
  const kernels::Plane p = StoredPlanes(spec, t)[plane];
  const uint64_t bytes = UsedPlaneBytes(p, t.elements);
  const bool is_weight = plane == 0;
  const std::vector<uint64_t> flat = {bytes / p.bytes};
  shard->header.Add(is_weight ? t.name : absl::StrCat(t.name, "/", p.name), DtypeOf(p, is_weight),
                    p.per == 1 ? t.shape : flat, bytes);
  shard->planes.push_back({tensor, plane, bytes});
}

// "model-00001-of-00002.safetensors"; which number there are is known at the end.
void Close(std::vector<OpenShard> open, absl::string_view kind, std::vector<CheckpointShard>* shards) {
  const size_t count = open.size();
  for (size_t s = 0; s < count; ++s) {
    shards->push_back({.name = absl::StrFormat("%s-%05d-of-%05d.safetensors", kind, s + 1, count),
                       .header = std::move(open[s].header).Finish(),
                       .planes = std::move(open[s].planes)});
  }
}

OpenShard& Last(std::vector<OpenShard>* open, uint64_t shard_bytes) {
  if (open->empty() || open->back().header.data_bytes() > shard_bytes) open->emplace_back();
  return open->back();
}

}  // namespace

uint64_t UsedPlaneBytes(const kernels::Plane& plane, uint64_t elements) {
  return (elements + plane.per - 1) / plane.per * plane.bytes;
}

std::vector<CheckpointShard> LayOutCheckpoint(const RunSpec& spec, uint64_t shard_bytes) {
  std::vector<OpenShard> model, optimizer;
  for (uint32_t i = 0; i < spec.tensors.size(); ++i) {
    const size_t planes = StoredPlanes(spec, spec.tensors[i]).size();
    AddPlane(spec, i, 0, &Last(&model, shard_bytes));
    for (size_t p = 1; p < planes; ++p) AddPlane(spec, i, p, &Last(&optimizer, shard_bytes));
  }
  std::vector<CheckpointShard> shards;
  Close(std::move(model), "model", &shards);
  Close(std::move(optimizer), "optimizer", &shards);
  return shards;
}

std::string CheckpointIndex(const RunSpec& spec, const std::vector<CheckpointShard>& shards) {
  std::string map;
  uint64_t bytes = 0;
  for (const CheckpointShard& shard : shards) {
    for (const CheckpointPlane& plane : shard.planes) {
      if (plane.plane != 0) continue;
      absl::StrAppend(&map, map.empty() ? "" : ",", QuotedName(spec.tensors[plane.tensor].name), ":\"", shard.name,
                      "\"");
      bytes += plane.bytes;
    }
  }
  return absl::StrCat("{\"metadata\":{\"total_size\":", bytes, "},\"weight_map\":{", map, "}}\n");
}

std::string ClientStateHeader(const std::vector<uint64_t>& bytes) {
  SafetensorsHeader header;
  for (size_t rank = 0; rank < bytes.size(); ++rank) {
    if (bytes[rank] > 0) header.Add(absl::StrCat("rank/", rank), "U8", {bytes[rank]}, bytes[rank]);
  }
  return std::move(header).Finish();
}

}  // namespace ballast
