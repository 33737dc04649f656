// A file or a folder of ModelFs: as processes see it, as the disk has it for sure, and the changes between the two.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"

namespace ballast {

struct ModelNode;

// Of a file's bytes, of its size, or of what a folder calls a node.
struct ModelChange {
  enum class State { kNew, kSynced, kGivenUp };  // kGivenUp: a sync of it has failed
  static constexpr uint64_t kSector = 512;

  uint64_t offset = 0;
  std::string bytes = {};
  std::optional<uint64_t> size = {};     // in place of the two
  std::shared_ptr<ModelNode> node = {};  // in a folder: it has this name from now on, and no other; empty: none
  std::string name = {};
  State state = State::kNew;

  // How many things may become of it when the power is cut: nothing, all, or some sectors of a write.
  uint64_t options() const;
  // What is there if this option was chosen, which is not 0.
  ModelChange Torn(uint64_t chosen) const;
};

struct ModelNode {
  using Names = std::map<std::string, std::shared_ptr<ModelNode>, std::less<>>;
  using Choose = absl::FunctionRef<uint64_t(uint64_t options)>;

  bool is_folder = false;
  std::string content = {};
  Names names = {};
  // As it was when all of it was on the disk, and what came since, which leads to the above.
  std::string kept_content = {};
  Names kept_names = {};
  std::vector<ModelChange> changes = {};

  void Add(ModelChange change);
  void Sync();
  void SyncFails();
  // All of it is on the disk, whatever failed before.
  void Keep();
  // What leads to the node from this folder is on the disk. false: it is not under this folder.
  bool KeepNamesTo(const ModelNode* of);
  // With everything that it has a name for.
  uint64_t Bytes() const;
  // Adds all names under this folder, one a line.
  void Dump(const std::string& path, std::string* to) const;
  std::shared_ptr<ModelNode> AfterCut(Choose choose) const;

 private:
  void Apply(const ModelChange& change);
  void ApplyName(const std::vector<ModelChange>& history, size_t index);
};

}  // namespace ballast
