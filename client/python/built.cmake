# ballast::kernels, ballast::proto, ballast::tls and ballast::client as archives of BALLAST_BUILD, a build folder of the tree. All are
# position-independent, and have in every build without sanitizers the options that decide their bits.
find_package(PkgConfig REQUIRED)
pkg_check_modules(XXHASH REQUIRED IMPORTED_TARGET libxxhash)
pkg_check_modules(ISAL REQUIRED IMPORTED_TARGET libisal)
find_package(OpenSSL REQUIRED)

# name: of the target ballast::NAME. archive: its path in the build folder. LIBS: as its CMakeLists.txt has them.
function(ballast_built name archive)
  cmake_parse_arguments(arg "" "" "LIBS" ${ARGN})
  if(NOT EXISTS ${BALLAST_BUILD}/${archive})
    message(FATAL_ERROR "BALLAST_BUILD is ${BALLAST_BUILD}, and has no ${archive}: build ballast_${name} there first")
  endif()
  add_library(ballast::${name} STATIC IMPORTED)
  set_target_properties(ballast::${name} PROPERTIES IMPORTED_LOCATION ${BALLAST_BUILD}/${archive}
                        INTERFACE_INCLUDE_DIRECTORIES "${CMAKE_CURRENT_SOURCE_DIR}/../..;${BALLAST_BUILD}/proto/gen"
                        INTERFACE_LINK_LIBRARIES "${arg_LIBS}")
endfunction()

ballast_built(kernels kernels/libballast_kernels.a)
ballast_built(proto proto/libballast_proto.a
              LIBS gRPC::grpc++ protobuf::libprotobuf PkgConfig::XXHASH PkgConfig::ISAL absl::span absl::status
                   absl::statusor absl::strings absl::synchronization absl::time ${CMAKE_DL_LIBS})
ballast_built(tls proto/libballast_tls.a
              LIBS OpenSSL::SSL OpenSSL::Crypto absl::status absl::statusor absl::strings absl::str_format absl::time)
ballast_built(client client/cpp/libballast_client.a
              LIBS ballast::tls ballast::proto absl::str_format absl::synchronization absl::time Threads::Threads)
