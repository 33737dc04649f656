// A daemon that has storage, and is stopped or crashes: for tests of what the next one goes on from.
#pragma once

#include <filesystem>
#include <string>

#include "tests/server/rpc/team_fixture.h"
#include "tests/server/storage/temporary_folder.h"

namespace ballast::testing {

template <class Test>
class Stored : public Test {
 protected:
  void SetUp() override { StartIn("first"); }
  void StartIn(const std::string& name) {
    Config config = Test::DefaultConfig();
    config.storage.dir = FolderOf(name);
    std::filesystem::create_directory(config.storage.dir);
    this->StartServer(config);
  }
  std::string FolderOf(const std::string& name) const { return folder_.path() + "/" + name; }
  // As if the machine had lost its power: what the daemon writes when it is stopped is not there.
  void Crash(typename Test::Team* team) {
    std::filesystem::copy(FolderOf("first"), FolderOf("copy"), std::filesystem::copy_options::recursive);
    StartAgain("copy", team);
  }
  void StartAgain(const std::string& name, typename Test::Team* team) {
    team->wires.clear();
    this->server_.reset();
    StartIn(name);
  }

 private:
  TemporaryFolder folder_;
};

}  // namespace ballast::testing
