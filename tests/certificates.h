// Certificates for tests, in a folder of the test's own: an authority, and pairs that it signs.
#pragma once

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/tls/certificate_files.h"

#include "client/cpp/ctl/authority.h"

namespace ballast {

inline ctl::Validity ValidAround(absl::Time now) { return {now - absl::Hours(1), now + absl::Hours(1)}; }

class TestCertificates {
 public:
  TestCertificates() {
    std::string folder = (std::filesystem::temp_directory_path() / "ballast_tls_XXXXXX").string();
    EXPECT_NE(mkdtemp(folder.data()), nullptr);
    folder_ = folder;
  }
  ~TestCertificates() { std::filesystem::remove_all(folder_); }

  std::string Path(const std::string& name) const { return (folder_ / name).string(); }
  // As an operator rotates: the file is there whole, or not at all.
  std::string Write(const std::string& name, const std::string& text, mode_t mode) const {
    const std::string path = Path(name), next = path + ".next";
    std::ofstream(next, std::ios::binary) << text;
    EXPECT_EQ(chmod(next.c_str(), mode), 0);
    std::filesystem::rename(next, path);
    return path;
  }
  // NAME.crt and NAME.key.
  void WritePair(const std::string& name, const ctl::PemPair& pair) const {
    Write(name + ".crt", pair.certificate, 0644);
    Write(name + ".key", pair.key, 0600);
  }

  static ctl::Authority MakeAuthority(const std::string& name = "test CA",
                                      const ctl::Validity& validity = ValidAround(absl::Now())) {
    return ctl::Authority::Make(name, validity).value();
  }
  static ctl::PemPair DaemonPair(const ctl::Authority& authority,
                                 const ctl::Validity& validity = ValidAround(absl::Now()),
                                 const std::vector<std::string>& names = {"localhost", "127.0.0.1", "::1"}) {
    return authority.Issue({.common_name = "ballastd", .end = TlsEnd::kDaemon, .names = names, .validity = validity})
        .value();
  }
  static ctl::PemPair TrainerPair(const ctl::Authority& authority,
                                  const ctl::Validity& validity = ValidAround(absl::Now())) {
    return authority
        .Issue({.common_name = "trainer",
                .end = TlsEnd::kClient,
                .names = {"spiffe://test/trainer"},
                .validity = validity})
        .value();
  }

 private:
  std::filesystem::path folder_;
};

}  // namespace ballast
