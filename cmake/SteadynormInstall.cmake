# SPDX-License-Identifier: Apache-2.0
# Two things can be installed. By default the C++ package: headers, static libraries, find_package(steadynorm).
# The component `python` is the Python package; wheels are made of it.
include_guard()
include(CMakePackageConfigHelpers)

set(steadynorm_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/steadynorm)

# --- C++ package -----------------------------------------------------------------------------------------------------
install(DIRECTORY include/steadynorm DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development)
install(TARGETS steadynorm_core steadynorm_reference steadynorm_cpu EXPORT steadynormTargets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
install(EXPORT steadynormTargets NAMESPACE steadynorm:: DESTINATION ${steadynorm_package_dir} COMPONENT development)
if(STEADYNORM_WITH_CUDA)
  install(TARGETS steadynorm_cuda_plan steadynorm_cuda EXPORT steadynormCudaTargets
          ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
  install(EXPORT steadynormCudaTargets NAMESPACE steadynorm:: DESTINATION ${steadynorm_package_dir}
          COMPONENT development)
endif()

configure_package_config_file(cmake/steadynormConfig.cmake.in steadynormConfig.cmake
  INSTALL_DESTINATION ${steadynorm_package_dir} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(steadynormConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/steadynormConfig.cmake ${PROJECT_BINARY_DIR}/steadynormConfigVersion.cmake
        DESTINATION ${steadynorm_package_dir} COMPONENT development)

# --- Python package --------------------------------------------------------------------------------------------------
if(STEADYNORM_WITH_TORCH)
  install(TARGETS steadynorm_torch LIBRARY DESTINATION steadynorm/lib COMPONENT python EXCLUDE_FROM_ALL)
  if(STEADYNORM_WITH_TORCH_PYTHON)
    install(TARGETS steadynorm_python LIBRARY DESTINATION steadynorm/lib COMPONENT python EXCLUDE_FROM_ALL)
  endif()
  # What the library was built for, readable when it cannot be loaded: it works with that minor version of torch only.
  set(architectures "[]")
  set(cuda null)
  if(STEADYNORM_WITH_TORCH_CUDA)
    list(JOIN CMAKE_CUDA_ARCHITECTURES "\", \"" architectures)
    set(architectures "[\"${architectures}\"]")
    set(cuda "\"${CUDAToolkit_VERSION}\"")
  endif()
  file(CONFIGURE OUTPUT build_info.json CONTENT [[{
  "version": "@PROJECT_VERSION@",
  "torch": "@STEADYNORM_TORCH_VERSION@",
  "cuda": @cuda@,
  "cuda_architectures": @architectures@,
  "compiler": "@CMAKE_CXX_COMPILER_ID@ @CMAKE_CXX_COMPILER_VERSION@"
}
]] @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/build_info.json DESTINATION steadynorm/lib COMPONENT python EXCLUDE_FROM_ALL)
endif()
if(NOT SKBUILD)
  # What the wheel builder does by itself: the sources, and the metadata that importlib.metadata reads.
  install(DIRECTORY python/steadynorm DESTINATION . COMPONENT python EXCLUDE_FROM_ALL
          FILES_MATCHING PATTERN "*.py" PATTERN "py.typed" PATTERN "__pycache__" EXCLUDE)
  file(CONFIGURE OUTPUT METADATA CONTENT "Metadata-Version: 2.1\nName: steadynorm\nVersion: @PROJECT_VERSION@\n" @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/METADATA DESTINATION steadynorm-${PROJECT_VERSION}.dist-info
          COMPONENT python EXCLUDE_FROM_ALL)
endif()
