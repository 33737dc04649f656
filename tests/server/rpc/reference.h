// What a run is to have: the same training by direct calls of the kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/registry.h"
#include "server/spec/run_spec.h"

namespace ballast::testing {

// Tensor by tensor, each in one piece.
class Reference {
 public:
  explicit Reference(const RunSpec& spec);
  // The tensors of `past`, which come first in this spec: as they are, or decoded and loaded where they are stored
  // otherwise. `past` loses them.
  void TakeOver(Reference* past);
  void Load(uint32_t tensor, const std::vector<float>& weights);
  void Update(uint32_t tensor, uint64_t step, const std::string& gradient, std::optional<double> lr = std::nullopt);
  // Updates by a sum of gradients in fp32, times `scale`, times `clip`.
  void UpdateBySum(uint32_t tensor, uint64_t step, const std::vector<float>& sum, float scale, float clip = 1,
                   std::optional<double> lr = std::nullopt);
  // Moves the tensor's averages, as an update does at its end.
  void Average(uint32_t tensor, uint64_t step);
  std::vector<float> Averaged(uint32_t tensor, size_t average) const;  // in fp32
  std::string EncodeAverage(uint32_t tensor, size_t average) const;    // as it is served
  std::string EncodeWeights(uint32_t tensor) const;
  std::vector<float> Master(uint32_t tensor) const;                                            // in fp32
  std::vector<float> State(uint32_t tensor, kernels::PlaneKind kind) const;                    // decoded
  void LoadState(uint32_t tensor, kernels::PlaneKind kind, const std::vector<float>& values);  // rounded to nearest
  std::vector<float> Scales(uint32_t tensor) const;
  std::vector<float> ScalesOfChunks(uint32_t tensor) const;  // as they are sent
  uint64_t Digest(uint32_t tensor) const;
  const kernels::Statistics& statistics(uint32_t tensor) const { return tensors_[tensor].statistics; }

 private:
  struct Payload {
    const void* data = nullptr;
    kernels::WireIndex format = 0;
    float scale = 1, clip = 1;
  };
  std::byte* Allocate(const kernels::Plane& plane, uint32_t tensor);
  std::string Encode(uint32_t tensor, const kernels::MasterFormat& master, std::byte* const* planes) const;
  std::vector<std::byte*> PlanesOf(uint32_t tensor, kernels::PlaneKind kind) const;
  void CopyPlanes(const Reference& past, uint32_t tensor, kernels::PlaneKind kind);
  void UpdateBy(uint32_t tensor, uint64_t step, const Payload& gradient, std::optional<double> lr);
  struct Tensor {
    std::vector<std::vector<std::byte>> storage;
    std::vector<std::byte*> planes, master_planes;
    std::vector<std::vector<std::byte*>> averages;  // their planes
    bool averaged = false;
    uint64_t t = 0;
    kernels::Statistics statistics = {};
  };
  const RunSpec spec_;
  std::vector<Tensor> tensors_;
};

}  // namespace ballast::testing
