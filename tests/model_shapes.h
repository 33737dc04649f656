// The parameters of published models: their shapes, in the models' own order, from the figures of the configuration that is
// published beside each one's weights (config.json).
#pragma once

#include <cstdint>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

namespace ballast::testing {

using Shape = std::vector<int64_t>;

inline uint64_t Elements(const Shape& shape) {
  return static_cast<uint64_t>(std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>()));
}

// A decoder with grouped attention, gated layers and RMS norms, as Llama 3 has.
struct Decoder {
  int64_t words, width, layers;  // vocab_size, hidden_size, num_hidden_layers
  int64_t queries, keys;         // num_attention_heads and num_key_value_heads, times head_dim
  int64_t hidden;                // intermediate_size; moe_intermediate_size, where there are experts
  bool own_head = true;          // not tie_word_embeddings
  // As Qwen3 has them: a router, and norms of queries and keys.
  int64_t experts = 0;  // num_experts
  int64_t head = 0;     // head_dim
  // All experts' matrices of a layer and kind are one tensor, as newer transformers have it, gate and up together.
  bool fused = false;
};

// meta-llama/Llama-3.2-1B, and Llama-3.1-8B, -70B and -405B.
inline constexpr Decoder kLlama1B = {128256, 2048, 16, 32 * 64, 8 * 64, 8192, /*own_head=*/false};
inline constexpr Decoder kLlama8B = {128256, 4096, 32, 32 * 128, 8 * 128, 14336};
inline constexpr Decoder kLlama70B = {128256, 8192, 80, 64 * 128, 8 * 128, 28672};
inline constexpr Decoder kLlama405B = {128256, 16384, 126, 128 * 128, 8 * 128, 53248};
// Qwen/Qwen3-30B-A3B.
inline constexpr Decoder kQwen3Moe = {151936, 2048, 48, 32 * 128, 4 * 128, 768, true, /*experts=*/128, /*head=*/128};
inline constexpr Decoder kQwen3MoeFused = {151936, 2048, 48, 32 * 128, 4 * 128, 768, true, 128, 128, /*fused=*/true};

inline std::vector<Shape> ExpertShapes(const Decoder& model) {
  std::vector<Shape> shapes = {{model.experts, model.width}};
  if (model.fused) {
    shapes.push_back({model.experts, 2 * model.hidden, model.width});
    shapes.push_back({model.experts, model.width, model.hidden});
    return shapes;
  }
  for (int64_t expert = 0; expert < model.experts; ++expert) {
    shapes.insert(shapes.end(), 2, {model.hidden, model.width});
    shapes.push_back({model.width, model.hidden});
  }
  return shapes;
}

inline std::vector<Shape> ShapesOf(const Decoder& model) {
  const int64_t width = model.width;
  std::vector<Shape> layer = {{model.queries, width}, {model.keys, width}, {model.keys, width}, {width, model.queries}};
  if (model.experts > 0) {
    layer.insert(layer.end(), 2, {model.head});
    for (Shape& shape : ExpertShapes(model)) layer.push_back(std::move(shape));
  } else {
    layer.insert(layer.end(), 2, {model.hidden, width});
    layer.push_back({width, model.hidden});
  }
  layer.insert(layer.end(), 2, {width});
  std::vector<Shape> shapes = {{model.words, width}};
  for (int64_t i = 0; i < model.layers; ++i) shapes.insert(shapes.end(), layer.begin(), layer.end());
  shapes.push_back({width});
  if (model.own_head) shapes.push_back({model.words, width});
  return shapes;
}

// sentence-transformers/all-MiniLM-L6-v2 without its pooling layer; its embedding is half of it.
inline std::vector<Shape> MiniLmShapes() {
  std::vector<Shape> shapes = {{30522, 384}, {512, 384}, {2, 384}, {384}, {384}};
  for (int layer = 0; layer < 6; ++layer) {
    for (int i = 0; i < 4; ++i) {
      shapes.push_back({384, 384});
      shapes.push_back({384});
    }
    shapes.insert(shapes.end(), 2, {384});
    shapes.push_back({1536, 384});
    shapes.push_back({1536});
    shapes.push_back({384, 1536});
    shapes.insert(shapes.end(), 3, {384});
  }
  return shapes;
}

}  // namespace ballast::testing
