// Layer groups: tensors that share their name up to the first number ("model.layers.17.mlp.w" -> "model.layers.17"),
// else embed, head, norm or their first part. At most `max_groups`; the rest fall into "other". Labels are valid UTF-8
// of at most 128 bytes. Immutable after construction.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ballast {

class LayerGroups {
 public:
  LayerGroups(const std::vector<std::string>& tensor_names, uint32_t max_groups);

  const std::vector<std::string>& names() const { return names_; }
  uint32_t group(uint32_t tensor) const { return group_[tensor]; }
  bool overflowed() const { return overflowed_; }

 private:
  std::vector<std::string> names_;
  std::vector<uint32_t> group_;
  bool overflowed_ = false;
};

}  // namespace ballast
