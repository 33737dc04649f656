// Run specs that are right, for tests to use as they are or to spoil.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "ballast/v1/run.pb.h"
#include "server/convert/convert.h"

namespace ballast::testing {

struct TensorLine {
  std::string name;
  std::initializer_list<int64_t> shape;
  std::string dtype = "bf16";
};

inline v1::RunSpec MakeSpec(const std::string& run_id, std::initializer_list<TensorLine> tensors) {
  v1::RunSpec spec;
  spec.set_run_id(run_id);
  spec.set_seed(7);
  spec.add_groups()->set_rule("adamw");
  for (const TensorLine& line : tensors) {
    v1::TensorSpec* t = spec.add_tensors();
    t->set_name(line.name);
    t->mutable_shape()->Add(line.shape.begin(), line.shape.end());
    t->set_dtype(line.dtype);
  }
  return spec;
}

// Weights, moments and 16 snapshots are some bytes more than 2^64.
inline v1::RunSpec UncountableSpec() {
  v1::RunSpec spec = MakeSpec("r1", {});
  spec.mutable_groups(0)->set_master("fp32");
  spec.mutable_groups(0)->set_state("fp32");
  spec.mutable_rewind()->set_snapshots(16);
  for (int i = 0; i < 82242; ++i) {
    v1::TensorSpec* t = spec.add_tensors();
    t->set_name(std::to_string(i));
    t->add_shape(int64_t{1} << 40);
    t->set_dtype("fp32");
  }
  return spec;
}

// Of a rule over matrices: what has fewer than two dimensions is another group's.
inline void KeepVectorsApart(v1::RunSpec* spec) {
  const auto apart = static_cast<uint32_t>(spec->groups_size());
  spec->add_groups()->set_rule("adamw");
  for (v1::TensorSpec& tensor : *spec->mutable_tensors()) {
    if (tensor.shape_size() < 2) tensor.set_group(apart);
  }
}

// By a daemon with the default limits.
inline RunSpec Made(const v1::RunSpec& spec) { return ToRunSpec(spec, {}).value(); }

inline v1::RunSpec SmallSpec() {
  return MakeSpec("r1", {{"embed.weight", {300, 100}}, {"layers.0.w", {64, 64}, "fp32"}, {"layers.0.b", {5}}});
}

}  // namespace ballast::testing
