// Ranks that hold shards of a run's tensors, as FSDP cuts them, and one rank that holds all: the same gradients, for
// tests that compare bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <future>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "client/cpp/client.h"
#include "client/cpp/wire/tensor_table.h"
#include "tests/client/quiet_client.h"
#include "tests/normals.h"

namespace ballast {

// Rows and columns: one element, fewer rows than ranks, a tile and one, three chunks of 4096 and some, rows that no
// chunk ends with.
inline constexpr int64_t kShapes[][2] = {{1, 1}, {7, 1}, {4097, 1}, {97, 131}, {5, 4096}};
inline constexpr uint32_t kSharded = std::size(kShapes);
inline uint64_t ElementsOf(uint32_t tensor) {
  return static_cast<uint64_t>(kShapes[tensor][0]) * static_cast<uint64_t>(kShapes[tensor][1]);
}

struct ShardedSpec {
  std::string run_id = "sharded";
  std::string dtype = "fp32";
  v1::CommitMode commit = v1::COMMIT_MODE_RELEASE;
  uint32_t ranks = 8;
  uint32_t micros = 1;
};
inline v1::RunSpec SpecOf(const ShardedSpec& wanted) {
  v1::RunSpec spec;
  spec.set_run_id(wanted.run_id);
  for (uint32_t i = 0; i < kSharded; ++i) {
    v1::TensorSpec* tensor = spec.add_tensors();
    tensor->set_name(absl::StrCat("layers.", i, ".w"));
    tensor->set_dtype(wanted.dtype);
    for (const int64_t extent : kShapes[i]) tensor->add_shape(extent);
  }
  spec.add_groups()->set_rule("adamw");
  spec.set_commit(wanted.commit);
  spec.set_reduction(v1::REDUCTION_SUM);
  spec.set_ranks(wanted.ranks);
  spec.set_accumulation(wanted.micros);
  if (wanted.commit == v1::COMMIT_MODE_STAGED) spec.set_max_grad_norm(0.5);
  spec.set_stats_every(1);
  spec.set_seed(5);
  spec.mutable_rewind()->set_snapshots(2);
  spec.mutable_rewind()->set_every(1);
  return spec;
}

// Normal values and zeros of both signs, in fp32 or bf16.
inline std::string ValuesOf(const std::string& dtype, uint32_t tensor, uint64_t seed) {
  std::mt19937_64 random(seed * 1000 + tensor);
  const std::vector<float> normals = testing::NormalValues(seed * 1000 + tensor, 0.1f, ElementsOf(tensor));
  std::string bytes;
  for (uint64_t e = 0; e < ElementsOf(tensor); ++e) {
    const float value = random() % 16 == 0 ? (random() % 2 == 0 ? 0.0f : -0.0f) : normals[e];
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    if (dtype == "bf16") bits >>= 16;
    bytes.append(reinterpret_cast<const char*>(&bits), dtype == "bf16" ? 2 : 4);
  }
  return bytes;
}

// What rank `part` of `parts` holds of a tensor: rows as torch.chunk cuts them, the last ones fewer or none.
inline Shard RowsOf(uint32_t tensor, uint32_t part, uint32_t parts) {
  const auto rows = static_cast<uint64_t>(kShapes[tensor][0]), columns = static_cast<uint64_t>(kShapes[tensor][1]);
  const uint64_t each = (rows + parts - 1) / parts;
  return {.begin = std::min(rows, part * each) * columns, .end = std::min(rows, (part + 1) * each) * columns};
}

// One process's rank: its shards and where their weights land.
class ShardedRank {
 public:
  // part: which shards it holds, of so many; a replica's gradients are sent by another.
  struct Place {
    uint32_t part = 0, parts = 1;
    bool contributes = true;
  };
  ShardedRank(const std::string& server, const ShardedSpec& spec, Place place)
      : spec_(spec), place_(place), client_(QuietClient(server)) {}

  absl::StatusOr<Attachment> Attach(uint32_t rank, uint32_t world, TransportChoice transport) {
    AttachOptions options{.run_id = spec_.run_id, .rank = rank, .world = world, .transport = transport};
    for (uint32_t i = 0; i < kSharded; ++i) {
      auto& shard = options.shards.emplace_back();
      if (place_.parts == 1 && place_.contributes) continue;  // whole
      shard = RowsOf(i, place_.part, place_.parts);
      shard->contributes = place_.contributes;
    }
    shards_ = options.shards;
    auto attachment = client_->Attach(options);
    if (!attachment.ok()) return attachment;
    for (uint32_t i = 0; i < kSharded; ++i) {
      landed_[i].assign(Held(i).size(), '?');
      if (auto s = client_->BindWeights(i, landed_[i].data(), landed_[i].size()); !s.ok()) return s;
    }
    return attachment;
  }
  absl::Status Load(const ShardedSpec& spec) {
    std::vector<std::string> values;
    for (uint32_t i = 0; i < kSharded; ++i) values.push_back(ValuesOf(spec.dtype, i, 999));
    std::vector<TensorView> views;
    for (uint32_t i = 0; i < kSharded; ++i) views.push_back({i, spec.dtype, BytesOf(values[i])});
    return client_->LoadWeights(views).status();
  }

  absl::Status Push(uint32_t tensor, const std::string& whole) {
    const ShardPiece held = Held(tensor);
    if (!place_.contributes || held.size() == 0) return absl::OkStatus();
    return client_->Push(tensor, BytesOf(whole).subspan(held.first, held.size()));
  }
  // Bytes of the tensor, in the format of gradients and weights.
  ShardPiece Held(uint32_t tensor) const {
    const uint64_t bytes = spec_.dtype == "bf16" ? 2 : 4;
    const auto& shard = shards_[tensor];
    return shard ? ShardPiece{shard->begin * bytes, shard->end * bytes} : ShardPiece{0, ElementsOf(tensor) * bytes};
  }
  const std::string& landed(uint32_t tensor) const { return landed_.at(tensor); }
  const Shards& shards() const { return shards_; }
  Client& client() { return *client_; }
  Place place() const { return place_; }

 private:
  const ShardedSpec spec_;
  const Place place_;
  Shards shards_;
  std::map<uint32_t, std::string> landed_;
  std::unique_ptr<Client> client_;  // last: it writes to the above
};

}  // namespace ballast
