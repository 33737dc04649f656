// Tensors on a GPU to be updated by a benchmark: which, and their planes, gradient and statistics.
#pragma once

#include <algorithm>
#include <bit>
#include <string>
#include <vector>

#include "kernels/registry.h"
#include "tests/kernels/cuda/device_memory.h"
#include "tests/model_shapes.h"

namespace ballast::kernels {

inline constexpr uint64_t kPattern = uint64_t{1} << 20;  // random numbers made; the rest repeats them

// What is updated in a round.
struct Work {
  std::string name;
  std::vector<uint64_t> sizes;
  bool together;  // one launch for all; else one each
};

// Llama-3.1-8B with so many layers.
inline std::vector<uint64_t> LlamaShapes(int layers) {
  testing::Decoder model = testing::kLlama8B;
  model.layers = layers;
  std::vector<uint64_t> sizes;
  for (const testing::Shape& shape : testing::ShapesOf(model)) sizes.push_back(testing::Elements(shape));
  return sizes;
}

// ViT/16 on 224 x 224 pixels, 1000 classes, as timm has it.
inline std::vector<uint64_t> VisionShapes(uint64_t width, int layers) {
  std::vector<uint64_t> sizes = {width, 197 * width, width * 3 * 16 * 16, width};
  for (int i = 0; i < layers; ++i) {
    const uint64_t square = width * width;
    const uint64_t layer[] = {width, width, 3 * square, 3 * width, square,     width,
                              width, width, 4 * square, 4 * width, 4 * square, width};
    sizes.insert(sizes.end(), std::begin(layer), std::end(layer));
  }
  for (const uint64_t n : {width, width, 1000 * width, uint64_t{1000}}) sizes.push_back(n);
  return sizes;
}

// About normal; no two blocks are alike.
inline std::vector<uint16_t> Bf16Pattern(float scale) {
  std::vector<uint16_t> values(kPattern);
  uint64_t word = 1;
  for (uint16_t& x : values) {
    word = word * 6364136223846793005u + 1442695040888963407u;
    int sum = 0;
    for (int shift = 32; shift < 64; shift += 8) sum += static_cast<int>(word >> shift & 0xff);
    x = static_cast<uint16_t>(std::bit_cast<uint32_t>(scale * (static_cast<float>(sum) - 510.0f) / 148.0f) >> 16);
  }
  return values;
}

inline void FillWithPattern(const DeviceArray& array, float scale, const Stream& stream) {
  const std::vector<uint16_t> pattern = Bf16Pattern(scale);
  uint64_t done = std::min(array.bytes(), pattern.size() * sizeof pattern[0]);
  Check(cudaMemcpyAsync(array.data(), pattern.data(), done, cudaMemcpyHostToDevice, stream.get()), "the pattern");
  for (; done < array.bytes(); done *= 2) {
    const uint64_t more = std::min(done, array.bytes() - done);
    Check(cudaMemcpyAsync(array.data() + done, array.data(), more, cudaMemcpyDeviceToDevice, stream.get()),
          "the pattern");
  }
  stream.Wait("the pattern");
}

// The tensors of one case, on the device.
class Tensors {
 public:
  Tensors(const Kernel& kernel, const Work& work, const Stream& stream)
      : kernel_(kernel), work_(work), stream_(stream) {
    uint64_t bytes[kMaxPlanes] = {};
    for (const uint64_t n : work.sizes) {
      Place& at = places_.emplace_back();
      at.first_tile = tiles_;
      at.element = padded_;
      for (size_t p = 0; p < kernel.planes.size(); ++p) {
        at.plane[p] = bytes[p];
        bytes[p] += (PlaneBytes(kernel.planes[p], n) + 255) / 256 * 256;
      }
      elements_ += n;
      padded_ += PaddedElements(n);
      tiles_ += TilesOf(n);
    }
    for (size_t p = 0; p < kernel.planes.size(); ++p) planes_.emplace_back(bytes[p]).Fill(std::byte{0}, stream);
    gradient_ = DeviceArray(padded_ * 2);
    statistics_ = DeviceArray(tiles_ * sizeof(TileStatistics));
    sums_ = DeviceArray(tiles_ * sizeof(float));
    FillWithPattern(gradient_, 0.02f, stream);
    LoadWeights();
    FillWithPattern(gradient_, 1e-3f, stream);
  }

  uint64_t elements() const { return elements_; }
  double BytesEach() const {
    double bytes = 2;
    for (const Plane& plane : kernel_.planes) bytes += 2.0 * plane.bytes / plane.per;
    return bytes;
  }
  // Needed on the device for `work`, without the copy's buffers.
  static uint64_t BytesNeeded(const Kernel& kernel, const Work& work) {
    uint64_t bytes = 0;
    for (const uint64_t n : work.sizes) {
      for (const Plane& plane : kernel.planes) bytes += PlaneBytes(plane, n) + 256;
      bytes += PaddedElements(n) * 2 + TilesOf(n) * (sizeof(TileStatistics) + sizeof(float));
    }
    return bytes;
  }

  struct Asked {
    bool stochastic;
    StatisticsLevel statistics;
  };
  DeviceArray Batch(const Asked& asked) const {
    std::vector<DeviceUpdate> batch;
    for (size_t i = 0; i < places_.size(); ++i) {
      Update u{.grad = gradient_.data() + places_[i].element * 2,
               .grad_format = FindWireFormat("bf16"),
               .n = work_.sizes[i],
               .grad_scale = 1,
               .clip = 1,
               .random_key = RandomKey(i, 10),
               .stochastic = asked.stochastic,
               .statistics = asked.statistics};
      for (size_t p = 0; p < planes_.size(); ++p) u.planes[p] = planes_[p].data() + places_[i].plane[p];
      std::vector<double> hyper;
      for (const Hyper& h : kernel_.hypers) hyper.push_back(h.value);
      kernel_.prepare(hyper, 10, u.constants);
      const uint64_t tile = places_[i].first_tile;
      batch.push_back(
          {u, work_.together ? tile : 0, statistics_.as<TileStatistics>() + tile, sums_.as<float>() + tile});
    }
    return Uploaded(batch, stream_);
  }
  // ordinary: every update of the batch is (IsOrdinary).
  void Launch(const DeviceArray& batch, bool ordinary) const {
    const auto update = CudaKernels()[static_cast<size_t>(&kernel_ - Kernels().data())].update;
    auto* items = batch.as<DeviceUpdate>();
    if (work_.together) {
      Check(update(items, static_cast<int>(places_.size()), tiles_, ordinary, stream_.get()), "update");
      return;
    }
    for (size_t i = 0; i < places_.size(); ++i) {
      Check(update(items + i, 1, TilesOf(work_.sizes[i]), ordinary, stream_.get()), "update");
    }
  }
  uint64_t Rejected() const {
    uint64_t rejected = 0;
    for (const TileStatistics& t : Downloaded<TileStatistics>(statistics_, stream_)) rejected += t.rejected;
    return rejected;
  }

 private:
  struct Place {
    uint64_t first_tile, element, plane[kMaxPlanes];
  };

  void LoadWeights() const {
    const auto master = static_cast<size_t>(FindMasterFormat(kernel_.master) - MasterFormats().data());
    const DeviceArray refused = Uploaded(std::vector<uint32_t>{0}, stream_);
    std::vector<DeviceCopy> batch;
    for (size_t i = 0; i < places_.size(); ++i) {
      DeviceCopy copy{.last = work_.sizes[i], .first_tile = places_[i].first_tile};
      for (size_t p = 0; p < MasterFormats()[master].planes.size(); ++p)
        copy.planes[p] = planes_[p].data() + places_[i].plane[p];
      copy.payload = gradient_.data() + places_[i].element * 2;
      copy.refused = refused.as<uint32_t>();
      batch.push_back(copy);
    }
    const DeviceArray on_device = Uploaded(batch, stream_);
    Check(CudaMasters()[master].load(on_device.as<DeviceCopy>(), static_cast<int>(batch.size()), tiles_,
                                     FindWireFormat("bf16"), stream_.get()),
          "load");
    stream_.Wait("load");
  }

  const Kernel& kernel_;
  const Work& work_;
  const Stream& stream_;
  std::vector<Place> places_;
  uint64_t elements_ = 0, padded_ = 0, tiles_ = 0;
  std::vector<DeviceArray> planes_;
  DeviceArray gradient_, statistics_, sums_;
};

}  // namespace ballast::kernels
